// SPDX-License-Identifier: Apache-2.0
// The threads of a block as fibers of one thread of the system.
#include "cuda.h"

#include <setjmp.h>
#include <ucontext.h>

#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulation {
namespace {

constexpr size_t kStack = 64 << 10;
constexpr size_t kFence = 4096; // bytes around the shared memory that nobody may write to
constexpr unsigned char kGarbage = 0xFF;
constexpr int64_t kMostBlocks = 0x7FFFFFFF;
constexpr size_t kMostShared = 48 << 10; // more must be asked for

enum State { kNew, kReady, kAtBlock, kAtWarp, kDone };

struct Fiber {
  State state;
  jmp_buf resume;
  int round; // exchanges so far
};

struct Machine {
  std::mt19937_64 random{0};
  std::vector<Fiber> fibers;
  std::vector<unsigned char> stacks, memory;
  std::vector<uint64_t> lanes[2]; // of exchanges in turn, so that one barrier is enough
  std::vector<int> ready;
  ucontext_t start, home;
  jmp_buf leave;
  Place place{};
  const std::function<void()>* kernel = nullptr;
  std::string error;
} machine;

// Back to the scheduler, until it resumes this fiber.
__attribute__((noinline)) void pause() {
  if (!_setjmp(machine.fibers[machine.place.thread.x].resume)) _longjmp(machine.leave, 1);
}

void run_fiber() {
  (*machine.kernel)();
  machine.fibers[machine.place.thread.x].state = kDone;
  _longjmp(machine.leave, 1);
}

void start_fiber(int i) {
  getcontext(&machine.start);
  machine.start.uc_stack.ss_sp = machine.stacks.data() + size_t(i) * kStack;
  machine.start.uc_stack.ss_size = kStack;
  machine.start.uc_link = nullptr;
  makecontext(&machine.start, run_fiber, 0);
  setcontext(&machine.start);
}

__attribute__((noinline)) void resume(int i) {
  machine.place.thread.x = unsigned(i);
  if (_setjmp(machine.leave)) return;
  if (machine.fibers[i].state == kNew) {
    machine.fibers[i].state = kReady;
    start_fiber(i);
  }
  machine.fibers[i].state = kReady;
  _longjmp(machine.fibers[i].resume, 1);
}

// Lets fibers go on that have all come to their barrier.
void release(int first, int end, State barrier, bool none_may_be_done) {
  bool all = true, any = false, done = false;
  for (int i = first; i < end; ++i) {
    const State state = machine.fibers[i].state;
    done = done || state == kDone;
    any = any || state == barrier;
    all = all && (state == barrier || state == kDone);
  }
  if (!all || !any) return;
  if (done && none_may_be_done) {
    machine.error = "a lane has left before its warp exchanged numbers";
    return;
  }
  for (int i = first; i < end; ++i)
    if (machine.fibers[i].state == barrier) {
      machine.fibers[i].state = kReady;
      machine.ready.push_back(i);
    }
}

void run_block(int threads) {
  for (Fiber& fiber : machine.fibers) fiber.state = kNew, fiber.round = 0;
  machine.ready.resize(threads);
  std::iota(machine.ready.begin(), machine.ready.end(), 0);
  while (!machine.ready.empty() && machine.error.empty()) {
    std::swap(machine.ready[machine.random() % machine.ready.size()], machine.ready.back());
    const int i = machine.ready.back(), warp = i / 32 * 32;
    machine.ready.pop_back();
    resume(i);
    const State state = machine.fibers[i].state;
    if (state != kAtBlock) release(warp, std::min(warp + 32, threads), kAtWarp, true);
    if (state != kAtWarp && machine.ready.empty()) release(0, threads, kAtBlock, false);
  }
  for (const Fiber& fiber : machine.fibers)
    if (fiber.state != kDone && machine.error.empty())
      machine.error = "threads wait at barriers that others do not come to";
}

void check_fences(size_t shared) {
  for (size_t i = 0; i < machine.memory.size(); ++i) {
    const bool inside = i >= kFence && i < kFence + shared;
    if (!inside && machine.memory[i] != kGarbage)
      machine.error = "a block has written beyond its shared memory";
  }
}

} // namespace

void launch(int64_t blocks, int threads, size_t shared, const std::function<void()>& kernel) {
  if (blocks < 1 || blocks > kMostBlocks || shared > kMostShared)
    throw std::runtime_error("emulated kernel: a launch that a GPU refuses");
  machine.kernel = &kernel;
  machine.error.clear();
  machine.fibers.resize(threads);
  machine.stacks.resize(threads * kStack);
  for (auto& lanes : machine.lanes) lanes.resize(threads);
  std::vector<int64_t> order(blocks);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::shuffle(order.begin(), order.end(), machine.random);
  for (const int64_t block : order) {
    machine.memory.assign(kFence + shared + kFence, kGarbage);
    machine.place.block.x = unsigned(block);
    run_block(threads);
    check_fences(shared);
    if (!machine.error.empty()) throw std::runtime_error("emulated kernel: " + machine.error);
  }
}

const Place& place() {
  return machine.place;
}

unsigned char* shared_memory() {
  return machine.memory.data() + kFence;
}

void check_alignment(const void* pointer, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return;
  machine.error = "a vector of " + std::to_string(bytes) + " bytes at an odd address";
  machine.fibers[machine.place.thread.x].state = kDone;
  _longjmp(machine.leave, 1);
}

void block_barrier() {
  machine.fibers[machine.place.thread.x].state = kAtBlock;
  pause();
}

const uint64_t* exchange(uint64_t x) {
  Fiber& fiber = machine.fibers[machine.place.thread.x];
  auto& lanes = machine.lanes[fiber.round++ % 2];
  const unsigned thread = machine.place.thread.x;
  lanes[thread] = x;
  fiber.state = kAtWarp;
  pause();
  return lanes.data() + thread / 32 * 32;
}

} // namespace emulation

extern "C" void emulation_seed(uint64_t seed) {
  emulation::machine.random.seed(seed);
}
