// A GPU's block on a CPU, enough of it for the handlers: threads of a block, barriers, warp votes and shuffles, atomics, fences.
// Two builds. Fibers (default): a block's threads take turns on one OS thread, in an order that the seed picks, and change only
// at barriers and warp operations: fast, and a missing barrier shows as a wrong result. SHIM_THREADS: every thread of a block is
// an OS thread, for the thread sanitizer. Blocks of a grid run one after another, in an order that the seed picks.
#pragma once
#include <assert.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef SHIM_THREADS
#include <thread>
#include <vector>
#else
#include <setjmp.h>
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#ifdef SHIM_THREADS
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

struct alignas(16) uint4 { u32 x, y, z, w; };
struct dim3 { u32 x, y, z; };

namespace shim {

constexpr u32 MOST_THREADS = 1024;

struct Meeting {  // a barrier that can be met again and again; two sets of slots, so that none is overwritten before all read it
    u32 arrived, round;
    u64 slot[2][32];
};

struct Thread {
    u32 index;
    bool finished;
#ifndef SHIM_THREADS
    ucontext_t context;
    jmp_buf where;
    bool begun;
    char* stack;
#endif
};

struct Block {
    dim3 index, shape, grid;
    Meeting all;
    Meeting warp[MOST_THREADS / 32];
    Thread thread[MOST_THREADS];
};

extern thread_local Block* block;
extern thread_local Thread* self;
void yield();

struct Body {  // a kernel and its arguments, eight bytes each
    void (*call)(const void* function, const u64* arguments);
    const void* function;
    const u64* arguments;
};
void run(u32 blocks, u32 threads, u64 seed, const Body& body);

inline u32 meet(Meeting& meeting, u32 expected) {
    const u32 round = __atomic_load_n(&meeting.round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&meeting.arrived, 1, __ATOMIC_ACQ_REL) == expected) {
        __atomic_store_n(&meeting.arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&meeting.round, round + 1, __ATOMIC_RELEASE);
    } else {
        while (__atomic_load_n(&meeting.round, __ATOMIC_ACQUIRE) == round) yield();
    }
    return round & 1;
}

inline const u64* exchange(u32 mask, u64 mine) {
    assert(mask == 0xffffffffu && "only whole warps vote");
    Meeting& meeting = block->warp[self->index / 32];
    meeting.slot[__atomic_load_n(&meeting.round, __ATOMIC_ACQUIRE) & 1][self->index % 32] = mine;
    return meeting.slot[meet(meeting, 32)];
}

}  // namespace shim

#define threadIdx (dim3{shim::self->index, 0, 0})
#define blockIdx (shim::block->index)
#define blockDim (shim::block->shape)
#define gridDim (shim::block->grid)

inline void __syncthreads() { shim::meet(shim::block->all, shim::block->shape.x); }
inline u32 __shfl_sync(u32 mask, u32 value, int lane) { return u32(shim::exchange(mask, value)[lane]); }
inline u64 __shfl_xor_sync(u32 mask, u64 value, u32 distance) {
    return shim::exchange(mask, value)[(shim::self->index ^ distance) % 32];
}
inline u32 __ballot_sync(u32 mask, bool vote) {
    const u64* votes = shim::exchange(mask, vote);
    u32 result = 0;
    for (u32 lane = 0; lane < 32; lane++) result |= u32(votes[lane] != 0) << lane;
    return result;
}
inline u32 atomicAdd(u32* at, u32 value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline u32 atomicOr(u32* at, u32 value) { return __atomic_fetch_or(at, value, __ATOMIC_RELAXED); }
inline u32 atomicExch(u32* at, u32 value) { return __atomic_exchange_n(at, value, __ATOMIC_RELAXED); }
inline int __popc(u32 value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline u64 __umul64hi(u64 a, u64 b) { return u64((unsigned __int128)a * b >> 64); }
inline void __nanosleep(u32) { sched_yield(); }
inline void __threadfence_system() {
#ifndef SHIM_THREADS  // the sanitizer knows no fences; the barriers around it order the same accesses
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
inline void __threadfence() { __threadfence_system(); }
inline u64 load_acquire(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void store_release(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline u64 load_relaxed(const u64* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline void store_relaxed(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
inline uint4 load_16(const void* at) {
    assert(reinterpret_cast<u64>(at) % 16 == 0 && "a 16-byte access must be aligned");
    return *static_cast<const uint4*>(at);
}
inline void store_16(void* at, uint4 value) {
    assert(reinterpret_cast<u64>(at) % 16 == 0 && "a 16-byte access must be aligned");
    *static_cast<uint4*>(at) = value;
}
inline u64 device_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return u64(now.tv_sec) * 1000000000ull + u64(now.tv_nsec);
}
