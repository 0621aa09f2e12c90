// A page in the hands of one warp: lane l has units l, l + 32, ... Shared by the scanner and the applier.
// Constants of the region: PAGE_BYTES (a multiple of 512), REGION_BYTES, PAGE_COUNT, ACCESS, HASH_MASK, MOST_IN_FLIGHT.

constexpr u32 UNITS_PER_LANE = PAGE_BYTES / 16 / WARP;
// Loads of a lane that are under way at once: the largest divisor of its share up to MOST_IN_FLIGHT.
__device__ constexpr u32 largest_divisor(u32 n, u32 most) { return n % most == 0 ? most : largest_divisor(n, most - 1); }
constexpr u32 IN_FLIGHT = largest_divisor(UNITS_PER_LANE, MOST_IN_FLIGHT);

// All units of this page exist; only the last page can be short.
__device__ __forceinline__ bool is_whole(u64 page) { return PAGE_COUNT * PAGE_BYTES == REGION_BYTES || page + 1 < PAGE_COUNT; }

// Bytes of the unit at `offset` of the region that exist.
__device__ __forceinline__ u32 valid_bytes(u64 offset) {
    if (offset + 16 <= REGION_BYTES) return 16;
    return offset < REGION_BYTES ? u32(REGION_BYTES - offset) : 0;
}

// Hash of a page of the region; with COPY, the same bytes also go to `out` (a whole page; what does not exist is zero).
template <bool COPY>
__device__ __forceinline__ u64 read_page(const u8* region, u64 page, u8* out, u32 lane, u64 seed) {
    const u8* start = region + page * PAGE_BYTES;
    u64 sum = 0;
    if (is_whole(page)) {
#pragma unroll 1
        for (u32 base = 0; base < UNITS_PER_LANE; base += IN_FLIGHT) {
            uint4 held[IN_FLIGHT];
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; i++) held[i] = Unit<ACCESS>::load(start + ((base + i) * WARP + lane) * 16);
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; i++) {
                const u32 unit = (base + i) * WARP + lane;
                sum += hash_unit(held[i], unit, seed);
                if (COPY) store_16(out + unit * 16, held[i]);
            }
        }
    } else {
#pragma unroll 1
        for (u32 unit = lane; unit < UNITS_PER_LANE * WARP; unit += WARP) {
            const uint4 value = load_short(start + unit * 16, valid_bytes(page * PAGE_BYTES + unit * 16));
            sum += hash_unit(value, unit, seed);
            if (COPY) store_16(out + unit * 16, value);
        }
    }
    return finish_hash(warp_sum(sum), HASH_MASK);
}
