// The overflow arena of a device (docs/architecture.md, "Nothing is ever lost"): chunks of 8,192
// bytes in segments, a bitmap of taken chunks, and a counter of free ones. Whoever takes a chunk
// holds credit for it first, so the search in the bitmap always ends. Segments whose chunks have
// numbers from HOST_CHUNKS on lie in the host's memory, with a counter of their own: they back the
// worst case, and are taken where the device's memory has none left.
#define CHUNK_BYTES 8192u
#define HOST_CHUNKS (1u << 20)
#define ALL_TAKEN   0xffffffffu
// Words in which a chunk is searched for at home before it is searched for everywhere: one that is not full is among
// them unless nearly all are.
#define HOME_TRIES 8u

// Mirrors arena.py. The bitmap and the table of segments follow in the same allocation.
struct Arena {
    int free_chunks;    // neither taken nor reserved
    u32 failed_groups;  // groups that found no credit and were left as they were
    u32 taken_total;    // chunks ever taken
    u32 bitmap_words;   // of the open segments; those of closed ones are all taken
    u32 segment_shift;  // log2(chunks a segment)
    u32 home_words;     // chunks are taken in the first ones, so that the last segments get empty and can be closed
    int host_free;      // as free_chunks, of those in the host's memory
    u32 host_words;     // of the bitmap, from HOST_CHUNKS / 32 on; never closed
    u64* segments;
    u32* bitmap;
};

__device__ __forceinline__ u8* chunk_data(const Arena* arena, u32 chunk) {
    u32 shift = arena->segment_shift;
    return (u8*)arena->segments[chunk >> shift] + (size_t)(chunk & ((1u << shift) - 1)) * CHUNK_BYTES;
}

// Whose chunk it is: the serial number of a payload. Kept behind the chunks of each segment.
__device__ __forceinline__ u32* chunk_owner(const Arena* arena, u32 chunk) {
    u32 shift = arena->segment_shift;
    return (u32*)((u8*)arena->segments[chunk >> shift] + ((size_t)CHUNK_BYTES << shift)) +
           (chunk & ((1u << shift) - 1));
}

// Credit for `count` chunks; false (and nothing changed) where they are not free.
__device__ __forceinline__ bool reserve_chunks(Arena* arena, int count) {
    if (atomicSub(&arena->free_chunks, count) >= count) return true;
    atomicAdd(&arena->free_chunks, count);
    return false;
}

// In captured launches: credit for `chunks` a group, for all groups of block `block` of the payload (one a warp), by
// one thread; others have it after the next __syncthreads. Groups of a block without credit are counted and left as
// they were, and so are all after them until the host has been told (arena.py, `check`). One reservation a block:
// atomics on one word come one after the other.
__device__ __forceinline__ void reserve_for_block(const Args& a, u32 block, u32 chunks, bool& admitted) {
    if (threadIdx.x != 0) return;
    admitted = true;
    if (!a.reserve) return;
    u32 groups = min(warps(), a.end_group - a.first_group - block * warps());
    admitted = !*(volatile u32*)&a.arena->failed_groups && reserve_chunks(a.arena, (int)(groups * chunks));
    if (!admitted) atomicAdd(&a.arena->failed_groups, groups);
}

__device__ __forceinline__ void return_credit(Arena* arena, int count) {
    if (count) atomicAdd(&arena->free_chunks, count);
}

// Credit for one chunk, of which the host has made sure (arena.py); true where it lies in the host's memory. One lane
// calls. What others have tried for a moment is not there for this one: hence the loop.
__device__ __forceinline__ bool take_credit(Arena* arena) {
    while (true) {
        if (reserve_chunks(arena, 1)) return false;
        if (atomicSub(&arena->host_free, 1) >= 1) return true;
        atomicAdd(&arena->host_free, 1);
    }
}

// A chunk for which the caller holds credit, in the host's memory or the device's. One lane calls.
__device__ __forceinline__ u32 take_chunk(Arena* arena, bool host, u32 start, u32 serial) {
    const u32 first = host ? HOST_CHUNKS / 32 : 0, all = host ? arena->host_words : arena->bitmap_words;
    u32 words = host ? all : min(arena->home_words, all), word = start % words, tries = HOME_TRIES;
    atomicAdd(&arena->taken_total, 1u);
    while (true) {
        u32 taken = ((volatile u32*)arena->bitmap)[first + word];
        if (taken == ALL_TAKEN) {
            word = word + 1 == words ? 0 : word + 1;
            if (--tries == 0) {
                words = all;
                word = word * 0x9e3779b1u % words;  // scattered: next to home all would search the same words
            }
            continue;
        }
        u32 bit = 1u << (__ffs(~taken) - 1);
        if (!(atomicOr(&arena->bitmap[first + word], bit) & bit)) {
            u32 chunk = (first + word) * 32 + __ffs(bit) - 1;
            *chunk_owner(arena, chunk) = serial;
            return chunk;
        }
    }
}

// One lane calls, after every lane of its warp has read the chunk (__syncwarp).
__device__ __forceinline__ void free_chunk(Arena* arena, u32 chunk) {
    __threadfence();
    atomicAnd(&arena->bitmap[chunk >> 5], ~(1u << (chunk & 31)));
    __threadfence();
    atomicAdd(chunk >= HOST_CHUNKS ? &arena->host_free : &arena->free_chunks, 1);
}

// The chunk that a warp spills one group into: kept from the group's old state, or taken at the first spill.
struct SpillChunk {
    u32 chunk;   // NO_CHUNK: none yet
    int credit;  // reserved and not used (captured graphs)

    // `chunks`: for which the block reserved credit, a group.
    __device__ __forceinline__ void init(const Args& a, u32 old, int chunks) {
        chunk = old;
        credit = a.reserve ? chunks : 0;
    }

    // All lanes call. Outside captured graphs the host has made sure of credit (arena.py).
    __device__ __forceinline__ u32 take(const Args& a, u32 start, u32 lane) {
        u32 got = 0;
        if (lane == 0) {
            const bool host = !a.reserve && take_credit(a.arena);
            got = take_chunk(a.arena, host, start, a.serial);
        }
        credit -= a.reserve ? 1 : 0;
        return __shfl_sync(FULL_WARP, got, 0);
    }

    __device__ __forceinline__ u8* data(const Args& a, u32 start, u32 lane) {
        if (chunk == NO_CHUNK) chunk = take(a, start, lane);
        return chunk_data(a.arena, chunk);
    }

    // All lanes call at the end; `used`: the group's new state refers to the chunk.
    __device__ __forceinline__ void finish(const Args& a, bool used, u32 lane) {
        __syncwarp();
        if (lane == 0) {
            if (!used && chunk != NO_CHUNK) free_chunk(a.arena, chunk);
            return_credit(a.arena, credit);
        }
    }
};
