"""Checkpoints of a training on several workers: what is alike on all of them, and what belongs to each.

folder      the checkpoints of one training: which there are, which are whole
files       files that are whole or not there
writer      writes one, while the training goes on
contents    what is saved of a model
restoring   how a model goes on from it
moments     when to save, and whether the job is about to end
callback    `Checkpoint`
"""

from hvdx.keras.checkpoint.callback import Checkpoint
from hvdx.keras.checkpoint.restoring import restore
from hvdx.keras.checkpoint.writer import save

__all__ = ["Checkpoint", "restore", "save"]
