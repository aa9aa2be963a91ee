"""The codec of an engine: unless one is set, that of this user's newest calibration profile."""

from __future__ import annotations

from ctxreuse.codec import Codec, CodecDevice
from ctxreuse.errors import ConfigError
from ctxreuse.identity.model import ModelSpace

__all__ = ["UserCodec"]


class UserCodec:
    """What has a space decodes its blocks with ``codec``; see `ctxreuse.engines.base.Engine.codec`."""

    space: ModelSpace
    _codec: Codec | None = None
    #: Encodes for the codec on a device.
    _encoder: CodecDevice | None = None

    @property
    def codec(self) -> Codec:
        """Decodes blocks; unless one is set, that of this user's newest calibration profile, opened when needed."""
        if self._codec is None:
            self._codec = Codec.open(self.space)
            self._codec.device = self._encoder
        return self._codec

    @codec.setter
    def codec(self, codec: Codec) -> None:
        if codec.space.digest != self.space.digest:
            raise ConfigError("the codec is for another model space", where=self.space.architecture)
        self._codec = codec
        codec.device = codec.device or self._encoder
