"""The bus on ZeroMQ: BusServer (ROUTER) in the cloud, BusClient (DEALER) at the edge.

These modules only move messages; what messages mean is decided by sessions (`ctxreuse.bus.session`), which they drive.

**Threads.** Each end has one thread that owns its socket and runs its sessions; all public methods may be called from
any thread, which hand work over and ring a bell. Nothing is done in two threads at once.

**Memory.** A peer takes at most: `SEND_QUEUE` messages of ``max_payload`` that wait for it (no more is read from the
store while they do), `RECEIVE_QUEUE` messages that it sent (ZeroMQ then stops reading from its connection), one block
of each put that runs, and what the kernel buffers. Frames above the agreed size end the connection before they take
memory. A peer that is silent is cut off, so what it sends without end (a message that is never finished) counts no
longer than ``silence_ms``.

**Copies.** Payloads of 256 KiB or more are sent from the memory that the store's read made, and received ones are
copied once, from ZeroMQ's frame to their place in the block. Whoever passes memory to be sent must not change it.
"""

from ctxreuse.bus.zmqio_client import BusClient, LinkStats
from ctxreuse.bus.zmqio_dial import Estimate, LinkState
from ctxreuse.bus.zmqio_server import BusServer, PeerInfo

__all__ = ["BusClient", "BusServer", "Estimate", "LinkState", "LinkStats", "PeerInfo"]
