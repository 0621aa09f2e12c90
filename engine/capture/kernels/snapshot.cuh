// Snapshotter: all parts of one sequence's recurrent state, together in one buffer, or back from it. In place on the device a
// step overwrites them, so the copy must be made before the next step; the way on to the host is not urgent.
// Constants: PART_COUNT, RESTORE, and for each part p a struct Part<p> with bytes, slot_stride and access (bytes of one access).
//
// words: 0 base address of each part (u64 list)  1 slot  2 buffer

template <u32 ACCESS>
struct Access { typedef typename Piece<ACCESS>::type type; };
template <>
struct Access<16> { typedef uint4 type; };

template <typename P>
__device__ __forceinline__ void move_part(u8* state, u8* buffer, Crew crew) {
    typedef typename Access<P::access>::type Type;
    Type* here = reinterpret_cast<Type*>(state);
    Type* there = reinterpret_cast<Type*>(buffer);
#pragma unroll 4
    for (u64 at = crew.thread; at < P::bytes / P::access; at += crew.threads) {
        if (RESTORE)
            here[at] = there[at];
        else
            there[at] = here[at];
    }
}

template <u32 P>
struct Parts {
    static __device__ __forceinline__ void move(const u64* bases, u64 slot, u8* buffer, Crew crew) {
        move_part<Part<P>>(reinterpret_cast<u8*>(bases[P]) + slot * Part<P>::slot_stride, buffer, crew);
        Parts<P + 1>::move(bases, slot, buffer + Part<P>::bytes, crew);
    }
};
template <>
struct Parts<PART_COUNT> {
    static __device__ __forceinline__ void move(const u64*, u64, u8*, Crew) {}
};

__device__ void operate(const u64* words, Crew crew) {
    Parts<0>::move(reinterpret_cast<const u64*>(words[0]), words[1], reinterpret_cast<u8*>(words[2]), crew);
}
