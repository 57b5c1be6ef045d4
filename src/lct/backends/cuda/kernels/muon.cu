// Muon's Nesterov momentum on a compressed buffer, in one pass (step.cuh). The dense update goes on to torch.
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void muon_step(const __grid_constant__ StepList list) {
    run_step(list);
}
