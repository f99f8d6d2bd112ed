#include "pool.h"

#include <thread>

namespace hr {

namespace {

// How long a helper spins. It is long enough for the Python code between two kernels of a step, and
// short enough to leave the core to others between steps.
constexpr int64_t SPIN_TURNS = 4000;
// A caller that has waited this long waits for a helper that lost its core, and yields.
constexpr int64_t YIELD_TURNS = 20000;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool &Pool::instance() {
    // The pool is never destroyed, because helpers may be asleep in it when the process ends.
    static Pool *pool = new Pool;
    return *pool;
}

void Pool::grow(int64_t helpers) {
    for (; helpers_ < helpers; helpers_++) std::thread([this, index = helpers_] { help(index); }).detach();
}

void Pool::claim(uint32_t epoch) {
    uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
        if ((uint32_t)(state >> 32) != epoch || (uint32_t)state == CLOSED) return;
        int64_t next = (int64_t)(uint32_t)state;
        auto call = call_.load(std::memory_order_relaxed);
        auto context = context_.load(std::memory_order_relaxed);
        if (next >= chunks_.load(std::memory_order_relaxed)) return;
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
        call(context, next);
        done_.fetch_add(1, std::memory_order_release);
        state = state_.load(std::memory_order_acquire);
    }
}

void Pool::help(int64_t index) {
    uint32_t seen = 0;
    for (;;) {
        uint32_t epoch = epoch_.load(std::memory_order_acquire);
        for (int64_t turn = 0; epoch == seen && turn < SPIN_TURNS; turn++) {
            pause();
            epoch = epoch_.load(std::memory_order_acquire);
        }
        if (epoch == seen) {
            asleep_.fetch_add(1, std::memory_order_seq_cst);
            epoch_.wait(seen, std::memory_order_seq_cst);
            asleep_.fetch_sub(1, std::memory_order_relaxed);
            continue;
        }
        seen = epoch;
        if (index < wanted_.load(std::memory_order_relaxed)) claim(epoch);
    }
}

void Pool::run(int64_t chunks, int64_t threads, void (*call)(const void *, int64_t),
               const void *context) {
    // If another caller uses the pool at the moment, this caller does its work alone.
    if (threads <= 1 || chunks <= 1 || busy_.test_and_set(std::memory_order_acquire)) {
        for (int64_t i = 0; i < chunks; i++) call(context, i);
        return;
    }
    grow(threads - 1);
    uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    // The region is closed while its fields change; see claim().
    state_.store((uint64_t)epoch << 32 | CLOSED, std::memory_order_seq_cst);
    chunks_.store(chunks, std::memory_order_relaxed);
    call_.store(call, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    wanted_.store(threads - 1, std::memory_order_relaxed);
    state_.store((uint64_t)epoch << 32, std::memory_order_seq_cst);
    epoch_.store(epoch, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) epoch_.notify_all();
    claim(epoch);
    for (int64_t turn = 0; done_.load(std::memory_order_acquire) < chunks; turn++) {
        if (turn < YIELD_TURNS)
            pause();
        else
            std::this_thread::yield();
    }
    busy_.clear(std::memory_order_release);
}

}  // namespace hr
