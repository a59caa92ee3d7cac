# SPDX-License-Identifier: Apache-2.0
"""Plain words that the tasks' facts are made of."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = _words(
    "apple anchor arrow basket bell blanket bottle bread bucket butter button camel candle carpet "
    "cheese cherry clock cloud copper cotton crown diamond donkey dragon drum eagle engine feather "
    "fence finger flower forest fountain fox giraffe glass gold grape hammer honey horse island "
    "jacket kettle kitchen ladder lemon lion marble milk mirror monkey moon mountain mouse needle "
    "onion orange oven owl panda paper pencil pepper piano pillow pirate pocket potato pumpkin "
    "rabbit river rocket rose salt shadow ship silver snow spider spoon star stone storm sugar "
    "summer sword table thunder tiger tomato tower train turtle umbrella violin wagon water whale "
    "wheel window winter wolf"
)

ADJECTIVES = _words(
    "amber ancient blue brass brave bright broken brown calm careful cheap clean clever cold "
    "copper crooked curious dark dry dusty early empty famous fast foreign fresh gentle golden "
    "grand green grey happy heavy hidden hollow honest hungry iron jolly lazy little lonely long "
    "loud lucky modern narrow noisy old painted pale patient plain polite poor proud purple quiet "
    "rare red round royal rusty sharp short shy silent silver simple sleepy slow small smooth soft "
    "square strange striped sweet tall thin tired tiny warm wet white wide wild wise wooden yellow "
    "young"
)

PEOPLE = _words(
    "actor baker barber butcher captain carpenter clerk cook dancer doctor driver farmer fisher "
    "gardener guard hunter judge lawyer merchant miller miner nurse painter pilot poet porter "
    "priest sailor shepherd singer soldier tailor teacher thief widow writer"
)

THINGS = _words(
    "anchors apples arrows barrels baskets bells blankets books bottles boxes bricks brushes "
    "buckets buttons candles cards chairs clocks coats coins cups doors drums flags flutes gloves "
    "hammers hats hooks jars kettles keys knives ladders lamps letters maps mirrors nails needles "
    "paintings pans pearls pencils pipes plates ribbons rings ropes saddles shoes spoons stones "
    "swords tables tickets tools trunks wheels whistles"
)
