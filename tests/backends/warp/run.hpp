// Runs KERNEL, a block after the other, with an arena of 32 chunks.
static char stacks[32][1 << 16];
static const Args* argument;
static void lane_begins() {
    const unsigned lane = now;
    KERNEL(*argument);
    // Lanes end in turn, like all else.
    now = lane + 1;
    if (lane < 31) setcontext(&fibers[now]);
    setcontext(&caller);
}

// `chunks`: 32 of them and their owners. Returns how many chunks are free.
extern "C" int run(Args* args, u32 blocks, u8* chunks) {
    u64 segment = (u64)chunks;
    u32 bitmap = 0;
    Arena arena = {32, 0, 0, 1, 5, 1, 0, 0, &segment, &bitmap};
    args->arena = &arena;
    argument = args;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (u32 lane = 0; lane < 32; lane++) {
            lane_index[lane].x = lane;
            turn[lane] = 0;
            getcontext(&fibers[lane]);
            fibers[lane].uc_stack = {stacks[lane], 0, sizeof stacks[lane]};
            makecontext(&fibers[lane], lane_begins, 0);
        }
        now = 0;
        swapcontext(&caller, &fibers[0]);
    }
    return arena.free_chunks;
}
