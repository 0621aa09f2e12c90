// The executor's own source under the thread sanitizer: every device thread is an OS thread, two producers share the ring, the host
// starts the block again whenever it left, an operator is replaced all the while. Exits 0 when every task ran exactly once.
#include <stdio.h>

#include <atomic>

constexpr u64 CAPACITY = 4, TASKS = 80;
static Control control;
alignas(128) static Task ring[CAPACITY];
static u64 operators[2];
static u64 results[TASKS];  // written by the block, read by the producer that waited for the task
static std::atomic<u64> head{0}, collected{0};

static void first(const u64* words) {
    if (threadIdx.x == words[0] % 32) *reinterpret_cast<u64*>(words[1]) += words[0] + 1;
}
static void second(const u64* words) {
    if (threadIdx.x == 31 - words[0] % 32) *reinterpret_cast<u64*>(words[1]) += words[0] + 1;
}

static void produce() {
    for (;;) {
        const u64 position = head.fetch_add(1);
        if (position >= TASKS) return;
        Task* task = ring + position % CAPACITY;
        while (load_acquire(&task->state) != position * 4) sched_yield();
        task->op = 1;
        task->words[0] = position;
        task->words[1] = reinterpret_cast<u64>(results + position);
        store_release(&task->state, position * 4 + POSTED);
        while (load_acquire(&task->state) != position * 4 + DONE) sched_yield();
        if (task->result != RESULT_OK || results[position] != position + 1) {
            printf("task %llu: result %llu, value %llu\n", position, task->result, results[position]);
            exit(1);
        }
        store_release(&task->state, (position + CAPACITY) * 4);
        collected.fetch_add(1);
    }
}

int main() {
    for (u64 i = 0; i < CAPACITY; i++) ring[i].state = i * 4;
    control.lease_ns = 20000000;
    control.idle_ns = 2000000;
    operators[1] = reinterpret_cast<u64>(&first);
    const u64 arguments[] = {reinterpret_cast<u64>(&control), reinterpret_cast<u64>(ring), CAPACITY - 1,
                             reinterpret_cast<u64>(operators), 2};
    std::thread one(produce), two(produce), swapper([] {
        for (u64 turn = 0; collected.load() < TASKS; turn++) {
            store_release(operators + 1, reinterpret_cast<u64>(turn % 2 ? &first : &second));
            sched_yield();
        }
    });
    u64 launches = 0;
    while (collected.load() < TASKS) {
        shim::launch(executor, 1, THREADS, launches, arguments);
        launches++;
        if (load_acquire(&control.laps) != launches) return 2;
    }
    one.join();
    two.join();
    swapper.join();
    printf("tasks %llu, launches %llu\n", TASKS, launches);
    return control.position == TASKS ? 0 : 3;
}
