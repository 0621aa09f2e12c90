// What every handler shares: types, 16-byte accesses, fences at system scope, the page hash.
// A handler is a namespace: `engine/capture/source.py` writes its constants as constexpr, then includes its file inside it.
// Compiled by NVRTC for a GPU, and by the system's C++ compiler for the tests, where CONCORDIA_HOST names the shim's header.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef CONCORDIA_HOST
#include CONCORDIA_HOST
#else

__device__ __forceinline__ u64 load_acquire(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(u64* word, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_relaxed(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ u64 device_ns() {
    u64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

// Loads skip the first-level cache: a resident block must not read a line that it cached before the step wrote it.
__device__ __forceinline__ uint4 load_16(const void* at) { return __ldcg(static_cast<const uint4*>(at)); }
__device__ __forceinline__ void store_16(void* at, uint4 value) { *static_cast<uint4*>(at) = value; }

#endif

// A task's words: by value for a launch, in mapped memory for a graph, in the ring for the executor.
constexpr u32 WORD_COUNT = 12;
constexpr u32 WARP = 32;
constexpr u32 FULL_WARP = 0xffffffffu;

// Who works: warps of the whole grid, or of the executor's one block.
struct Crew {
    u32 thread, threads;
    __device__ u32 lane() const { return thread % WARP; }
    __device__ u32 warp() const { return thread / WARP; }
    __device__ u32 warps() const { return threads / WARP; }
};

__device__ __forceinline__ Crew grid_crew() {
    return Crew{blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x};
}
// Room of 256 bytes, where parts of a buffer begin.
__device__ __forceinline__ u64 aligned_256(u64 size) { return (size + 255) & ~u64(255); }

// True in thread 0 of the block that ends last, and there all that the others counted and wrote can be read. `finished` is a word of
// the device's memory that is zero before and after.
__device__ __forceinline__ bool ends_last(u32* finished, Crew crew) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0) return false;
    const u32 blocks = crew.threads / blockDim.x;
    if (atomicAdd(finished, 1u) + 1 != blocks) return false;
    atomicExch(finished, 0u);
    __threadfence();
    return true;
}

__device__ __forceinline__ Crew block_crew() { return Crew{threadIdx.x, blockDim.x}; }

template <u32 ACCESS>
struct Piece;
template <>
struct Piece<8> { typedef u64 type; };
template <>
struct Piece<4> { typedef u32 type; };
template <>
struct Piece<2> { typedef unsigned short type; };
template <>
struct Piece<1> { typedef u8 type; };

// Sixteen bytes by accesses of ACCESS bytes: 16 wherever alignment allows.
template <u32 ACCESS>
struct Unit {
    typedef typename Piece<ACCESS>::type Type;
    static __device__ __forceinline__ uint4 load(const u8* at) {
        union {
            uint4 whole;
            Type part[16 / ACCESS];
        } unit;
#pragma unroll
        for (u32 i = 0; i < 16 / ACCESS; i++) unit.part[i] = *(reinterpret_cast<const volatile Type*>(at) + i);
        return unit.whole;
    }
    static __device__ __forceinline__ void store(u8* at, uint4 value) {
        union {
            uint4 whole;
            Type part[16 / ACCESS];
        } unit;
        unit.whole = value;
#pragma unroll
        for (u32 i = 0; i < 16 / ACCESS; i++) *(reinterpret_cast<Type*>(at) + i) = unit.part[i];
    }
};
template <>
struct Unit<16> {
    static __device__ __forceinline__ uint4 load(const u8* at) { return load_16(at); }
    static __device__ __forceinline__ void store(u8* at, uint4 value) { store_16(at, value); }
};

// The unit at the end of a region: `valid` of its bytes exist, the rest reads as zero and is not written.
__device__ __forceinline__ uint4 load_short(const u8* at, u32 valid) {
    u32 word[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < 16; i++)
        if (i < valid) word[i / 4] |= u32(*(static_cast<const volatile u8*>(at) + i)) << (i % 4 * 8);
    return uint4{word[0], word[1], word[2], word[3]};
}

__device__ __forceinline__ void store_short(u8* at, uint4 value, u32 valid) {
    const u32 word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (u32 i = 0; i < 16; i++)
        if (i < valid) at[i] = u8(word[i / 4] >> (i % 4 * 8));
}

// ---------------------------------------------------------------- the page hash
// A sum over 16-byte units, each folded (64 x 64 -> 128 bits) with keys of its place: the order of summing is free, so lanes
// work apart. One unit costs about ten integer multiplications, a tenth of what memory allows on an H100 or H200.
// `engine/capture/hashing.py` is the same function in numpy.

constexpr u64 KEY_STEP_LOW = 0x9e3779b97f4a7c15ull;
constexpr u64 KEY_STEP_HIGH = 0xd1b54a32d192ed03ull;

__device__ __forceinline__ u64 hash_unit(uint4 unit, u64 index, u64 seed) {
    const u64 low = unit.x | (u64(unit.y) << 32), high = unit.z | (u64(unit.w) << 32);
    const u64 a = low ^ (seed + (index + 1) * KEY_STEP_LOW);
    const u64 b = high ^ ((seed << 32 | seed >> 32) + (index + 1) * KEY_STEP_HIGH);
    return (__umul64hi(a, b) ^ (a * b)) + (low << 23 | low >> 41) + (high << 47 | high >> 17);
}

__device__ __forceinline__ u64 finish_hash(u64 sum, u64 mask) {
    sum ^= sum >> 33;
    sum *= 0xff51afd7ed558ccdull;
    sum ^= sum >> 29;
    return sum & mask;
}

__device__ __forceinline__ u64 warp_sum(u64 value) {
#pragma unroll
    for (u32 distance = WARP / 2; distance; distance /= 2) value += __shfl_xor_sync(FULL_WARP, value, distance);
    return value;
}
