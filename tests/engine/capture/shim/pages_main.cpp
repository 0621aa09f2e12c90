// A page handler's own source under the thread sanitizer: two blocks of OS threads scan a region in which every third page changed.
#include <stdio.h>

constexpr u64 PAGES = 24;
alignas(256) static u8 region[PAGES * handler::PAGE_BYTES];
constexpr u64 HASHES_AT = 512, PAGES_AT = 768;
static_assert(4 * PAGES <= 256 && 8 * PAGES <= 256, "each list has 256 bytes");
alignas(256) static u8 out[PAGES_AT + PAGES * handler::PAGE_BYTES];
static u64 table[PAGES];
static u32 bitmap[1], counters[2];

static u32 scan(u64 flags) {
    const u64 words[WORD_COUNT] = {reinterpret_cast<u64>(region), reinterpret_cast<u64>(table), reinterpret_cast<u64>(bitmap),
                                   reinterpret_cast<u64>(out), reinterpret_cast<u64>(counters), 0, 0, PAGES, 77, flags, 0, PAGES};
    shim::launch(run, 2, 64, flags, words);
    return *reinterpret_cast<u32*>(out);
}

int main() {
    for (u64 i = 0; i < sizeof region; i++) region[i] = u8(i * 31 >> 3);
    if (scan(1) != PAGES || scan(0) != 0) return 1;
    for (u64 page = 0; page < PAGES; page += 3) region[page * handler::PAGE_BYTES + page]++;
    const u32 found = scan(0);
    printf("changed %u\n", found);
    return found == PAGES / 3 ? 0 : 2;
}
