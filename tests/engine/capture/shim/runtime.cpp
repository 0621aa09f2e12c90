// The part of the shim that all handlers share, a library of its own: an operator that the executor calls lies in another library
// than the executor, and both mean the same thread and block.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
#include "device.hpp"

namespace shim {

thread_local Block* block;
thread_local Thread* self;

inline u64 mixed(u64& state) {
    state += 0x9e3779b97f4a7c15ull;
    u64 value = state;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

inline void shuffle(u32* order, u32 count, u64& state) {
    for (u32 i = 0; i < count; i++) order[i] = i;
    for (u32 i = count; i > 1; i--) {
        const u32 other = u32(mixed(state) % i), kept = order[i - 1];
        order[i - 1] = order[other];
        order[other] = kept;
    }
}

#ifdef SHIM_THREADS

void yield() { sched_yield(); }

void run_block(Block* here, const Body& body, u64&) {
    std::vector<std::thread> threads;
    for (u32 i = 0; i < here->shape.x; i++)
        threads.emplace_back([here, &body, i] {
            block = here;
            self = &here->thread[i];
            self->index = i;
            body.call(body.function, body.arguments);
        });
    for (auto& thread : threads) thread.join();
}

#else

constexpr u64 STACK_BYTES = 64 << 10;
static thread_local jmp_buf scheduler;
static thread_local ucontext_t entry;
static thread_local const Body* running;

void yield() {
    if (!_setjmp(self->where)) _longjmp(scheduler, 1);
}

static void fiber() {
    running->call(running->function, running->arguments);
    self->finished = true;
    _longjmp(scheduler, 1);
}

void run_block(Block* here, const Body& body, u64& state) {
    static thread_local u32 order[MOST_THREADS];
    const u32 count = here->shape.x;
    block = here;
    running = &body;
    shuffle(order, count, state);
    for (u32 left = count; left;) {
        for (u32 i = 0; i < count; i++) {
            Thread* thread = &here->thread[order[i]];
            if (thread->finished) continue;
            thread->index = order[i];
            self = thread;
            if (_setjmp(scheduler) == 0) {
                if (thread->begun) _longjmp(thread->where, 1);
                thread->begun = true;
                if (!thread->stack) thread->stack = static_cast<char*>(malloc(STACK_BYTES));
                getcontext(&thread->context);
                thread->context.uc_stack.ss_sp = thread->stack;
                thread->context.uc_stack.ss_size = STACK_BYTES;
                thread->context.uc_link = nullptr;
                makecontext(&thread->context, fiber, 0);
                swapcontext(&entry, &thread->context);
            }
            if (here->thread[order[i]].finished) left--;
        }
    }
}

#endif

void run(u32 blocks, u32 threads, u64 seed, const Body& body) {
    assert(threads <= MOST_THREADS && threads % 32 == 0);
    Block* here = static_cast<Block*>(calloc(1, sizeof(Block)));
    u32* order = static_cast<u32*>(malloc(blocks * sizeof(u32)));
    shuffle(order, blocks, seed);
    here->shape = dim3{threads, 1, 1};
    here->grid = dim3{blocks, 1, 1};
    for (u32 i = 0; i < blocks; i++) {
        here->index = dim3{order[i], 0, 0};
        memset(&here->all, 0, sizeof here->all);
        memset(here->warp, 0, sizeof here->warp);
        for (u32 t = 0; t < threads; t++) {
            here->thread[t].finished = false;
#ifndef SHIM_THREADS
            here->thread[t].begun = false;
#endif
        }
        run_block(here, body, seed);
    }
#ifndef SHIM_THREADS
    for (u32 t = 0; t < threads; t++) free(here->thread[t].stack);
#endif
    free(order);
    free(here);
}

}  // namespace shim
