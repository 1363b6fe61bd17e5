"""``zerort bench nvme``, ``offload`` and ``checkpoint``: what stores reach of the disk's own speed."""
