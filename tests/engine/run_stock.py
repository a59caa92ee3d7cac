# SPDX-License-Identifier: Apache-2.0
"""Answer prompts with vLLM as it is, in a process of its own: `run_stock.py IN.json OUT.json`."""

import json
import sys


def main(source: str, target: str) -> None:
    from vllm import LLM, SamplingParams

    with open(source) as file:
        job = json.load(file)
    llm = LLM(**job["engine"])
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    with open(target, "w") as file:
        json.dump([list(output.outputs[0].token_ids) for output in outputs], file)


if __name__ == "__main__":
    main(*sys.argv[1:])
