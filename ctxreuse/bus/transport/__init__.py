"""The bus on ZeroMQ: BusServer (ROUTER) in the cloud, BusClient (DEALER) at the edge.

These modules only move messages; what messages mean is decided by sessions (`ctxreuse.bus.protocol.session`),
which they drive.

**Threads.** Each end has one thread that owns its socket and runs its sessions; all public methods may be called from
any thread: they hand work over and wake that one. Nothing is done in two threads at once.

**Memory.** A peer takes at most: `SEND_QUEUE` messages of ``max_payload`` that wait for it (no more is read from the
store while they do, but one payload of each fetch), `RECEIVE_QUEUE` messages that it sent (ZeroMQ then stops reading
from its connection), one block of each put that runs, and what the kernel buffers. Frames above the agreed size end the
connection before they take memory. A silent peer is cut off, so a message that is never finished occupies memory for
``silence_ms`` at most.

**Copies.** Payloads of 256 KiB or more are sent from the memory that the store's read made. Blocks that were received
whole stay in ZeroMQ's frame, parts are copied once, from there to their place in the block. Memory passed to be sent
must not be changed.
"""

from ctxreuse.bus.transport.client import BusClient, ClientOptions, LinkStats
from ctxreuse.bus.transport.dialer import LinkState
from ctxreuse.bus.transport.server import BusServer, PeerInfo

__all__ = ["BusClient", "BusServer", "ClientOptions", "LinkState", "LinkStats", "PeerInfo"]
