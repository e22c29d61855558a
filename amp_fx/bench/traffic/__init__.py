"""``python -m amp_fx.bench bytes``: what the generated kernels move, counted and not timed.

Nothing runs. Fake tensors go through Dynamo, autograd, autocast, amp_fx and inductor, for the CPU
or for CUDA; inductor's scheduler is asked what each of its kernels reads and writes. So neither
the memory of the models nor a GPU is needed, for CUDA only a build of torch that has it.
"""
