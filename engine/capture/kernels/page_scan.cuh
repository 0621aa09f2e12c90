// Page scanner: which pages of a region changed since its table was last written, and their bytes, in one launch.
// HASH mode: a 64-bit hash a page is compared with a table on the device (8 bytes a page, no shadow copy). BITMAP mode: the
// region's allocator or instrumented kernels set a bit a page; a bit is taken exactly once. A warp works on BATCH pages, and
// claims room for all that changed among them with one atomic. A page for which there was no room stays "changed": its table
// entry is not written, its bit is set again. The hash that travels is of the bytes that travel.
//
// Counting is done in the device's memory, an atomic to the host's would cost its way there and back; the last block tells the host.
//
// words: 0 region  1 table (u64 a page)  2 bitmap (u32 for 32 pages)  3 out: 256 bytes of which the first u32 becomes the count of
//        changed pages, those without room too; then indices (u32), hashes (u64) and pages, each part at a multiple of 256 bytes
//        4 counters (2 u32 of the device, zero)  7 room (pages)  8 seed  9 flags (1: take every page)  10 first page (bitmap: a
//        multiple of 32)  11 end page

constexpr u32 TAKE_EVERY_PAGE = 1;

__device__ __forceinline__ u32 changed_by_hash(const u64* words, u64 first, u32 n, u32 lane, bool every) {
    const u8* region = reinterpret_cast<const u8*>(words[0]);
    const u64* table = reinterpret_cast<const u64*>(words[1]);
    const u64 known = lane < n ? table[first + lane] : 0;
    u64 mine = 0;
    if (!every) {
#pragma unroll 1
        for (u32 k = 0; k < n; k++) {
            const u64 hash = read_page<false>(region, first + k, nullptr, lane, words[8]);
            if (lane == k) mine = hash;
        }
    }
    return __ballot_sync(FULL_WARP, lane < n && (every || mine != known));
}

__device__ __forceinline__ u32 changed_by_bitmap(const u64* words, u64 first, u32 n, u32 lane, bool every) {
    u32* bitmap = reinterpret_cast<u32*>(words[2]);
    u32 taken = lane == 0 ? atomicExch(bitmap + first / 32, 0u) : 0;
    taken = __shfl_sync(FULL_WARP, taken, 0);
    const u32 existing = n == 32 ? FULL_WARP : (1u << n) - 1;
    return every ? existing : taken & existing;
}

// Apart from the loop that hashes: changed pages are few, and inlined it costs that loop its registers.
__device__ __noinline__ u64 copy_page(const u8* region, u64 page, u8* out, u32 lane, u64 seed) {
    return read_page<true>(region, page, out, lane, seed);
}

// Where the parts of the out buffer lie.
struct Out {
    u32 *count, *indices;
    u64* hashes;
    u8* pages;
    __device__ explicit Out(const u64* words) {
        u8* base = reinterpret_cast<u8*>(words[3]);
        const u64 room = words[7], hashes_at = 256 + aligned_256(4 * room);
        count = reinterpret_cast<u32*>(base);
        indices = reinterpret_cast<u32*>(base + 256);
        hashes = reinterpret_cast<u64*>(base + hashes_at);
        pages = base + hashes_at + aligned_256(8 * room);
    }
};

// Pages of `changed` (bit k: page first + k) -> the out arrays.
__device__ __forceinline__ void emit(const u64* words, u64 first, u32 changed, u32 lane) {
    const u32 room = u32(words[7]);
    const Out out(words);
    u32 base = lane == 0 ? atomicAdd(reinterpret_cast<u32*>(words[4]), u32(__popc(changed))) : 0;
    base = __shfl_sync(FULL_WARP, base, 0);
#pragma unroll 1
    for (u32 left = changed; left; left &= left - 1, base++) {
        const u64 page = first + u32(__ffs(int(left))) - 1;
        if (base >= room) {
            if (BITMAP && lane == 0) atomicOr(reinterpret_cast<u32*>(words[2]) + first / 32, left);
            return;
        }
        u8* target = out.pages + u64(base) * PAGE_BYTES;
        const u64 hash = copy_page(reinterpret_cast<const u8*>(words[0]), page, target, lane, words[8]);
        if (lane == 0) {
            out.indices[base] = u32(page);
            out.hashes[base] = hash;
            if (!BITMAP) reinterpret_cast<u64*>(words[1])[page] = hash;
        }
    }
}

__device__ void operate(const u64* words, Crew crew) {
    const bool every = words[9] & TAKE_EVERY_PAGE;
    const u64 end = words[11];
    for (u64 first = words[10] + u64(crew.warp()) * BATCH; first < end; first += u64(crew.warps()) * BATCH) {
        const u32 n = end - first < BATCH ? u32(end - first) : BATCH;
        const u32 changed = BITMAP ? changed_by_bitmap(words, first, n, crew.lane(), every)
                                   : changed_by_hash(words, first, n, crew.lane(), every);
        if (changed) emit(words, first, changed, crew.lane());
    }
    u32* counters = reinterpret_cast<u32*>(words[4]);
    if (ends_last(counters + 1, crew)) *Out(words).count = atomicExch(counters, 0u);
}
