// Row gatherer and scatterer: the rows of token ranges of several sequences, all groups and planes (that is: all layers),
// between the arena and frames, in one launch. The write-set is known, so nothing is searched.
// Constants: GROUP_COUNT, SCATTER, and for each group g a struct Group<g> with planes, row_bytes, slot_stride, plane_stride (bytes),
// ring_rows (0: rows lie at their position; else position modulo it) and access (bytes of one access).
// A frame is its groups one after another, each (planes, frame_tokens, row_bytes): tiers/layout.py.
//
// words: 0 base address of each group (u64 list)  1 items  2 item count  3 first row of each item in each group (u32 [items]
//        [GROUP_COUNT]), where that is not its start: a buffer that slides along the context; or 0  4 spans (u32 [items][GROUP_COUNT]
//        [2]): which of an item's tokens [begin, end) a group moves, ABSENT in begin for a group that its frame does not have; or 0: all

struct Item {
    u64 frame;
    u32 slot, start, count;           // rows of positions [start, start + count) of the slot
    u32 frame_tokens, frame_first;    // are rows [frame_first, frame_first + count) of a frame of frame_tokens
    u32 unused;
};

constexpr u32 ABSENT = 1u << 31;

// What one group of one item moves: `first` is the row of the arena of the token `begin`.
struct Span { u32 first, begin, end; };

template <u32 ACCESS>
struct Access { typedef typename Piece<ACCESS>::type type; };
template <>
struct Access<16> { typedef uint4 type; };

template <typename G>
__device__ __forceinline__ u64 arena_offset(const Item& item, u64 first, u64 plane, u64 within, u64 row_units) {
    u64 offset = u64(item.slot) * G::slot_stride + plane * G::plane_stride;
    if (G::ring_rows == 0) return offset + first * G::row_bytes + within * G::access;
    const u64 token = within / row_units;
    return offset + (first + token) % (G::ring_rows ? G::ring_rows : 1) * G::row_bytes + within % row_units * G::access;
}

// One group of one item; `frame` is where the group starts in the frame.
template <typename G>
__device__ __forceinline__ void move_group(u8* base, u8* frame, const Item& item, Span span, Crew crew) {
    typedef typename Access<G::access>::type Type;
    constexpr u32 ROW_UNITS = G::row_bytes / G::access;
    const u32 run = (span.end - span.begin) * ROW_UNITS, total = u32(G::planes) * run;
#pragma unroll 4
    for (u32 at = crew.thread; at < total; at += crew.threads) {
        const u32 plane = run == ROW_UNITS ? at / ROW_UNITS : at / run;
        const u32 within = at - plane * run;
        u8* here = base + arena_offset<G>(item, span.first, plane, within, ROW_UNITS);
        u8* there = frame + (u64(plane) * item.frame_tokens + item.frame_first + span.begin) * G::row_bytes + u64(within) * G::access;
        if (SCATTER)
            *reinterpret_cast<Type*>(here) = *reinterpret_cast<const Type*>(there);
        else
            *reinterpret_cast<Type*>(there) = *reinterpret_cast<const Type*>(here);
    }
}

template <u32 G>
struct Groups {
    static __device__ __forceinline__ void move(const u64* bases, const u32* firsts, const u32* spans, u8* frame, const Item& item, Crew crew) {
        const u32 begin = spans ? spans[2 * G] : 0, end = spans ? spans[2 * G + 1] : item.count;
        const u32 first = firsts ? firsts[G] : item.start;
        if (!(begin & ABSENT)) {
            // A buffer may begin behind the item's start: only `first + begin` is a row, so it is added in 32 bits.
            if (begin < end) move_group<Group<G>>(reinterpret_cast<u8*>(bases[G]), frame, item, Span{first + begin, begin, end}, crew);
            frame += Group<G>::planes * Group<G>::row_bytes * item.frame_tokens;
        }
        Groups<G + 1>::move(bases, firsts, spans, frame, item, crew);
    }
};
template <>
struct Groups<GROUP_COUNT> {
    static __device__ __forceinline__ void move(const u64*, const u32*, const u32*, u8*, const Item&, Crew) {}
};

// Blocks share the items out: one token of a sequence is too little for a whole grid, and what describes an item lies in the host's
// memory, so that a block that read all of them one after another would wait for the bus as often.
__device__ void operate(const u64* words, Crew crew) {
    const u64* bases = reinterpret_cast<const u64*>(words[0]);
    const Item* items = reinterpret_cast<const Item*>(words[1]);
    const u32* firsts = reinterpret_cast<const u32*>(words[3]);
    const u32* spans = reinterpret_cast<const u32*>(words[4]);
    const u32 count = u32(words[2]), blocks = crew.threads / blockDim.x, block = crew.thread / blockDim.x;
    const u32 teams = count < blocks ? count : blocks;
    if (teams == 0) return;
    const u32 team = block % teams, members = blocks / teams + (team < blocks % teams);
    const Crew own{block / teams * blockDim.x + threadIdx.x, members * blockDim.x};
    for (u32 i = team; i < count; i += teams) {
        const Item item = items[i];
        const u32* here = firsts ? firsts + i * GROUP_COUNT : nullptr;
        const u32* parts = spans ? spans + 2 * i * GROUP_COUNT : nullptr;
        if (item.count) Groups<0>::move(bases, here, parts, reinterpret_cast<u8*>(item.frame), item, own);
    }
}
