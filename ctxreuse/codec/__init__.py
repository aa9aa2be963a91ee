"""Levels at which blocks are encoded: lossless ones for any model, lossy ones by a calibration profile."""

from __future__ import annotations

from ctxreuse.block.levels import LevelInfo, LevelName, parse_level
from ctxreuse.codec.codec import Codec, CodecDevice
from ctxreuse.codec.profile import ChannelGroup, CodecProfile, Coding, PlaneProfile, ProfileLevel, model_digest
from ctxreuse.codec.profile_bytes import profile_digest, read_profile, write_profile
from ctxreuse.codec.profile_store import ProfileStore

__all__ = [
    "ChannelGroup",
    "Codec",
    "CodecDevice",
    "CodecProfile",
    "Coding",
    "LevelInfo",
    "LevelName",
    "PlaneProfile",
    "ProfileLevel",
    "ProfileStore",
    "model_digest",
    "parse_level",
    "profile_digest",
    "read_profile",
    "write_profile",
]
