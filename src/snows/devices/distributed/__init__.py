"""Several processes that prune together. Nothing else in the package imports torch.distributed.

`torchrun` starts the processes; each is a rank. All of them pass the same model and samples, and work on a share of the
samples. What is summed over samples is summed over ranks, too, so that all of them take the same steps.

ranks   what the other rooms ask, and the answers of a process alone
group   the answers of several processes
watch   which of them are alive
launch  what torchrun tells the processes that it starts
"""
