"""Attention over chunks where they are and as they are held: queries are turned to them, results merged."""

from ctxreuse.reuse.attend.held import Coded, Held, HeldMove, Slab, Turn
from ctxreuse.reuse.attend.resident import Residents
from ctxreuse.reuse.attend.select import Selection

__all__ = ["Coded", "Held", "HeldMove", "Residents", "Selection", "Slab", "Turn"]
