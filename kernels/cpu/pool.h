// The thread pool that all kernels use. Its caller never waits for a helper thread that has not
// begun.
//
// A parallel region is a list of chunks, which the caller and the helpers claim one by one. The
// caller waits only for chunks that a helper has begun. OpenMP is different: its regions end when
// every thread has arrived. If another process holds a core, each OpenMP region lasts until the
// missing thread is scheduled again (8 ms instead of 65 us were measured).
//
// Torch keeps its own OpenMP threads for its own operators. After each operator they spin for
// milliseconds, unless OMP_WAIT_POLICY=passive is in the environment before torch is imported.
#pragma once

#include <atomic>
#include <cstdint>

namespace hr {

class Pool {
   public:
    // Runs call(context, i) for every i in [0, chunks), on up to `threads` threads.
    void run(int64_t chunks, int64_t threads, void (*call)(const void *, int64_t),
             const void *context);
    static Pool &instance();

   private:
    void help(int64_t index);
    void grow(int64_t helpers);
    // Claims and runs chunks of the region `epoch` until all chunks are claimed.
    void claim(uint32_t epoch);

    // The high half is the region's number, and the low half is the next chunk. A late helper
    // therefore cannot claim a chunk of a region whose fields it has not read.
    std::atomic<uint64_t> state_{CLOSED};
    std::atomic<int64_t> chunks_{0}, done_{0}, wanted_{0};
    std::atomic<void (*)(const void *, int64_t)> call_{nullptr};
    std::atomic<const void *> context_{nullptr};
    std::atomic<uint32_t> epoch_{0};
    std::atomic<int32_t> asleep_{0};
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    int64_t helpers_ = 0;
    static constexpr uint64_t CLOSED = 0xffffffffu;
};

// Runs f(i) for every i in [0, chunks).
template <class F>
inline void for_each(int64_t chunks, int64_t threads, const F &f) {
    Pool::instance().run(
        chunks, threads, [](const void *context, int64_t i) { (*(const F *)context)(i); }, &f);
}

// Runs f(begin, end) over parts of [0, n). If `work` (about the number of elements touched) is
// small, this thread does everything alone.
template <class F>
inline void parallel(int64_t n, int64_t threads, int64_t work, const F &f) {
    constexpr int64_t SERIAL_WORK = 1 << 15;
    constexpr int64_t PARTS = 4;  // per thread, so that a late helper still finds one
    if (n <= 0) return;
    if (threads <= 1 || n == 1 || work < SERIAL_WORK) {
        f((int64_t)0, n);
        return;
    }
    int64_t chunks = n < threads * PARTS ? n : threads * PARTS;
    for_each(chunks, threads, [&](int64_t i) { f(n * i / chunks, n * (i + 1) / chunks); });
}

}  // namespace hr
