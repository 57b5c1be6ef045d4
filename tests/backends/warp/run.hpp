// Runs KERNEL, whose parameter is an ARGUMENT, a block after the other.
static char stacks[32][1 << 16];
static const ARGUMENT* argument;
static void lane_begins() {
    const unsigned lane = now;
    KERNEL(*argument);
    // Lanes end in turn, like all else.
    now = lane + 1;
    if (lane < 31) setcontext(&fibers[now]);
    setcontext(&caller);
}

extern "C" void run(const ARGUMENT* given, u32 blocks) {
    argument = given;
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
}
#ifdef TENSORS
// What a step computes, of `count` packed pairs of dense values, a multiple of 4.
extern "C" void update(const StepArgs* args, u32** values, u32* grad, u64 count) {
    const Update change(*args);
    for (u64 i = 0; i < count; i += 4) {
        u32 some[TENSORS][4];
        for (int t = 0; t < TENSORS; t++)
            memcpy(some[t], values[t] + i, 16);
        change(some, *(u32(*)[4])(grad + i));
        for (int t = 0; t < TENSORS; t++)
            memcpy(values[t] + i, some[t], 16);
    }
}
#endif
