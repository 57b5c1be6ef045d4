// Adam and AdamW on a compressed parameter and its compressed moments, in one pass (step.cuh).
//
// ROUNDING 0: every operation rounds to BF16, as torch's foreach and single-tensor paths do. They differ in one place:
// foreach divides the root of the second moment by its correction, single-tensor (RECIPROCAL) multiplies by a
// reciprocal, because torch's division by a number on CUDA does.
// ROUNDING 1: torch's fused path: FP32 throughout, the parameter and the moments rounded once.
// L2_DECAY, DECOUPLED_DECAY, MAXIMIZE, SCALED: 1 where an option needs that arithmetic.
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void adam_step(const __grid_constant__ StepList list) {
    run_step(list);
}
