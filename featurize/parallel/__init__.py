"""Jobs on several GPUs: what each rank keeps, and what the ranks tell each other.

Start reading at `layout.Parallel`; `data_parallel` follows DistributedDataParallel, `overlap` times what ranks send.
"""
