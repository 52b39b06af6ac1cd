"""What each kind of task does; a new `TaskKind` gets a case in `worker.perform` and a function here.

compute.py       F, R, B, BI, BW
rehearsal.py     what of a backward BI can leave to BW
transfers.py     SEND_F, RECV_F, SEND_B, RECV_B
collectives.py   ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER
update.py        NORM, UPDATE
host.py          OFFLOAD, RELOAD
buckets.py       what a task may see of its buckets
"""
