"""Checkpoints of a training on several workers, with the state that the ranks share and the state of each rank.

folder      folder with the checkpoints of one training
owner       lock that allows one job at a time to save to a folder
files       atomic file writes, and arrays in files
writer      writing of checkpoints while training continues
contents    contents of a checkpoint
parts       parts of split layers in a checkpoint
restoring   restoring of a model
newcomers   the same state for ranks that join, without files
schedule    times to save, and polls of the ranks
callback    `Checkpoint`
"""

from hvdx.keras.checkpoint.callback import Checkpoint
from hvdx.keras.checkpoint.restoring import restore
from hvdx.keras.checkpoint.writer import save

__all__ = ["Checkpoint", "restore", "save"]
