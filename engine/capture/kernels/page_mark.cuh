// Marks pages of a bitmap region as changed. words: 0 bitmap (u32 for 32 pages)  1 page indices (u32)  2 how many
__device__ void operate(const u64* words, Crew crew) {
    const u32* pages = reinterpret_cast<const u32*>(words[1]);
    for (u64 i = crew.thread; i < words[2]; i += crew.threads)
        if (pages[i] < PAGE_COUNT) atomicOr(reinterpret_cast<u32*>(words[0]) + pages[i] / 32, 1u << (pages[i] % 32));
}
