// Applier: pages back into a region through a block table, each verified before it is written.
// A page whose bytes do not match their hash, or whose place lies outside the region, is left out and reported.
//
// words: 0 region  1 table to renew (u64 a page, or 0)  2 pages  3 logical index of each (u32)  4 block table: logical page ->
//        place (u32, or 0: the same)  5 expected hashes (u64)  6 how many  7 seed  8 counters (REPORT_WORDS + 1 u32 of the device,
//        zero)  9 block table length  10 report (u32: applied, refused, then the numbers of the first REPORTED refused)

constexpr u32 REPORTED = 30, REPORT_WORDS = REPORTED + 2;

// Whether a lane's share of a page stays in its registers between the hash and the write.
constexpr bool HELD = UNITS_PER_LANE == IN_FLIGHT;

__device__ __forceinline__ void load_units(uint4* held, const u8* payload, u32 base, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < IN_FLIGHT; i++) held[i] = load_16(payload + ((base + i) * WARP + lane) * 16);
}

__device__ __forceinline__ u64 hash_units(const uint4* held, u32 base, u32 lane, u64 seed) {
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < IN_FLIGHT; i++) sum += hash_unit(held[i], (base + i) * WARP + lane, seed);
    return sum;
}

__device__ __forceinline__ void write_units(u8* region, u64 page, const uint4* held, u32 base, u32 lane) {
    u8* start = region + page * PAGE_BYTES;
    const bool whole = is_whole(page);
#pragma unroll
    for (u32 i = 0; i < IN_FLIGHT; i++) {
        const u32 unit = (base + i) * WARP + lane;
        if (whole)
            Unit<ACCESS>::store(start + unit * 16, held[i]);
        else
            store_short(start + unit * 16, held[i], valid_bytes(page * PAGE_BYTES + unit * 16));
    }
}

__device__ __forceinline__ u64 place_of(const u64* words, u32 logical) {
    const u32* block_table = reinterpret_cast<const u32*>(words[4]);
    if (!block_table) return logical;
    return logical < words[9] ? block_table[logical] : PAGE_COUNT;
}

// Writes a page whose payload has the expected hash to its place; false if it has not. The payload may lie in the host's memory, and
// to read it costs its way over the bus: once, if it can be held.
__device__ __forceinline__ bool put_page(u8* region, u64 place, const u8* payload, u64 expected, u32 lane, u64 seed) {
    uint4 held[IN_FLIGHT];
    u64 sum = 0;
#pragma unroll 1
    for (u32 base = 0; base < UNITS_PER_LANE; base += IN_FLIGHT) {
        load_units(held, payload, base, lane);
        sum += hash_units(held, base, lane, seed);
    }
    if (place >= PAGE_COUNT || finish_hash(warp_sum(sum), HASH_MASK) != expected) return false;
#pragma unroll 1
    for (u32 base = 0; base < UNITS_PER_LANE; base += IN_FLIGHT) {
        if (!HELD) load_units(held, payload, base, lane);
        write_units(region, place, held, base, lane);
    }
    return true;
}

__device__ void operate(const u64* words, Crew crew) {
    const u32 lane = crew.lane();
    u32* report = reinterpret_cast<u32*>(words[8]);
    for (u64 number = crew.warp(); number < words[6]; number += crew.warps()) {
        const u8* payload = reinterpret_cast<const u8*>(words[2]) + number * PAGE_BYTES;
        const u64 place = place_of(words, reinterpret_cast<const u32*>(words[3])[number]);
        const u64 expected = reinterpret_cast<const u64*>(words[5])[number];
        const bool good = put_page(reinterpret_cast<u8*>(words[0]), place, payload, expected, lane, words[7]);
        if (lane != 0) continue;
        if (good) {
            if (words[1]) reinterpret_cast<u64*>(words[1])[place] = expected;
            atomicAdd(report, 1u);
        } else {
            const u32 refused = atomicAdd(report + 1, 1u);
            if (refused < REPORTED) report[2 + refused] = u32(number);
        }
    }
    if (ends_last(report + REPORT_WORDS, crew))
        for (u32 i = 0; i < REPORT_WORDS; i++) reinterpret_cast<u32*>(words[10])[i] = atomicExch(report + i, 0u);
}
