"""Tensor parallelism: one process, a *rank*, per slice of the weights and of the KV heads.

Every rank has the whole engine, and executes the commands of rank 0. A plan is a function of these
commands and of rank 0's decisions, so all ranks make the same plan. Rank 0 takes and sends all
decisions that depend on a clock, a thread or a measurement."""

from looseleaf.parallel.collectives import Collectives, make_collectives
from looseleaf.parallel.link import Link
from looseleaf.parallel.processes import RankProcesses
from looseleaf.parallel.ranks import Ranks
from looseleaf.parallel.shard import Cut, Shard

__all__ = ["Collectives", "Cut", "Link", "RankProcesses", "Ranks", "Shard", "make_collectives"]
