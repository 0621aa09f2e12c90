// The persistent executor: one resident block that takes tasks from a ring in mapped host memory.
// One lane waits; the block works; the commit word of a task is stored with release at system scope after every thread's
// writes were fenced, so that a host that sees it sees the results. The block leaves after a lease, when idle, or when told to,
// and never inside a task: whoever waits for the whole device waits for one lease and one task at most. The next launch goes
// on at the position where this one stopped. One executor at a time: launches follow each other on one stream.
// docs/cuda.md has the layout of the control page and of a task; engine/capture/executor.py is the host's side.
#include "common.cuh"

constexpr u64 POSTED = 1, RUNNING = 2, DONE = 3;                // state word of a task: position * 4 + one of these; 0 is free
constexpr u64 LEFT_IDLE = 1, LEFT_LEASE = 2, LEFT_STOPPED = 3;  // why the block left
constexpr u64 RESULT_OK = 0, RESULT_NO_OPERATOR = 1;
constexpr u64 HEARTBEAT_NS = 50000;

struct Task {  // 128 bytes, one cache line
    u64 state;
    u64 op;
    u64 words[WORD_COUNT];
    u64 result;
    u64 finished_ns;
};

struct Control {  // each group on its own 128-byte line: host writes the first, the device the second
    u64 stop, lease_ns, idle_ns, poll_ns, reserved_host[12];
    u64 alive, position, left, heartbeat_ns, busy_ns, started_ns, laps, reserved_device[9];
};

typedef void (*Operator)(const u64* words);

__device__ __forceinline__ u64 wait_for_task(Control* control, Task* task, u64 position, u64 started, u64 worked) {
    const u64 lease_ns = load_relaxed(&control->lease_ns), idle_ns = load_relaxed(&control->idle_ns);
    const u32 poll_ns = u32(load_relaxed(&control->poll_ns));
    u64 beaten = 0;
    for (;;) {
        if (load_acquire(&control->stop)) return LEFT_STOPPED;
        const u64 now = device_ns();
        if (now - started >= lease_ns) return LEFT_LEASE;
        if (load_acquire(&task->state) == position * 4 + POSTED) return 0;
        if (now - worked >= idle_ns) return LEFT_IDLE;
        if (now - beaten >= HEARTBEAT_NS) store_relaxed(&control->heartbeat_ns, beaten = now);  // each is a write over the bus
        __nanosleep(poll_ns);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) executor(Control* control, Task* ring, u64 ring_mask, const u64* operators, u64 operator_count) {
    __shared__ u64 verdict, operation, words[WORD_COUNT];
    const bool leader = threadIdx.x == 0;
    u64 position = 0, started = 0, worked = 0, busy = 0;
    if (leader) {
        position = load_relaxed(&control->position);
        busy = load_relaxed(&control->busy_ns);
        started = worked = device_ns();
        store_relaxed(&control->started_ns, started);
        store_release(&control->alive, 1);
    }
    for (;;) {
        Task* task = nullptr;
        u64 began = 0;
        if (leader) {
            task = ring + (position & ring_mask);
            verdict = wait_for_task(control, task, position, started, worked);
            if (!verdict) {
                began = device_ns();
                store_relaxed(&task->state, position * 4 + RUNNING);
                const u64 op = load_relaxed(&task->op);
                // An entry can be replaced at any time: what a task runs is what stood there when it began.
                operation = op < operator_count ? load_acquire(operators + op) : 0;
                for (u32 i = 0; i < WORD_COUNT; i++) words[i] = load_relaxed(task->words + i);
            }
        }
        __syncthreads();
        if (verdict) break;
        if (operation) reinterpret_cast<Operator>(operation)(words);
        __threadfence_system();
        __syncthreads();
        if (leader) {
            worked = device_ns();
            busy += worked - began;
            store_relaxed(&task->result, operation ? RESULT_OK : RESULT_NO_OPERATOR);
            store_relaxed(&task->finished_ns, worked);
            store_relaxed(&control->busy_ns, busy);
            store_relaxed(&control->heartbeat_ns, worked);
            position++;
            store_relaxed(&control->position, position);
            store_release(&task->state, (position - 1) * 4 + DONE);
        }
    }
    if (leader) {
        store_relaxed(&control->left, verdict);
        store_relaxed(&control->alive, 0);
        // Last: a host that sees it knows that the ring is its own again.
        store_release(&control->laps, load_relaxed(&control->laps) + 1);
    }
}

// Operator 0 of the table: nothing. What posting, waiting and answering cost by themselves.
__device__ void nothing(const u64*) {}

// A kernel is launched with as many registers as it and the functions that it may call need, and the assembler knows only this
// module's. This one, which is never called, holds 112 registers' worth of values, so that operators of other modules have room;
// the host compares their need with the executor's before it lets one in (engine/capture/executor.py).
__device__ __noinline__ void room_for_operators(const u64* words) {
    u64 held[48];
#pragma unroll
    for (u32 i = 0; i < 48; i++) held[i] = load_relaxed(words + i);
#pragma unroll
    for (u32 i = 0; i < 48; i++) store_relaxed(const_cast<u64*>(words) + 48 + i, held[i]);
}

extern "C" __global__ void first_operators(u64* out) {
    out[0] = reinterpret_cast<u64>(&nothing);
    out[1] = reinterpret_cast<u64>(&room_for_operators);
}

// Posts a task from a stream or inside a graph: what ran before it on the stream is visible to whoever sees the word.
extern "C" __global__ void post_task(u64* state, u64 value) {
    if (threadIdx.x != 0) return;
    __threadfence_system();
    store_release(state, value);
}
