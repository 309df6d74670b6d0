"""Surviving failures: a supervisor outside the training processes that watches, blames, replaces and restarts.

optimus launch        supervisor.py     starts attempts, decides what happened, takes a spare, starts again
    |  TCP, JSON lines                  messages.py
slots                 slot.py           one process a rank, on every node and spare: forks the training process
    |  fork                             (it has imported torch already), tells how it ended, shows its stack
training process      beacon.py         publishes its step, and that it lives, through the supervisor's TCPStore
"""
