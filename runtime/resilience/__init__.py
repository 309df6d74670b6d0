"""Surviving failures: a supervisor outside the training processes that watches, blames, replaces and restarts.

supervisor.py     attempt after attempt: who is replaced by which spare, and when to stop
attempt.py        one attempt, watched; verdict.py and soft.py: who is to blame for its end
slots.py          the slots of all nodes, started by engines.py on the hosts of hosts.py; messages.py: what they say
slot.py           one process a rank, spares too: has imported everything, forks the training process, tells its end
beacon.py         in the training process: its step, and that it lives, through the supervisor's TCPStore; stacks.py
inject.py         faults on purpose; incidents.py: what happened; job.py: a script for a batch system
"""
