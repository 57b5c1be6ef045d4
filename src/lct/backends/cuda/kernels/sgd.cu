// SGD with momentum on a compressed parameter and momentum buffer, in one pass (step.cuh).
//
// ROUNDING 0: every operation rounds to BF16, as torch's foreach and single-tensor paths do.
// ROUNDING 1: torch's fused path: sums in FP32, the parameter and the buffer rounded once.
// NESTEROV, MAXIMIZE, DECAY, SCALED: 1 where torch's option of that name is on.
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void sgd_step(const __grid_constant__ StepList list) {
    run_step(list);
}
