"""Levels at which blocks are encoded: lossless ones for any model, lossy ones by a card that calibration measured."""

from __future__ import annotations

from ctxreuse.codec.card import Card, CardLevel, ChannelGroup, Coding, PlaneCard, Rope, model_digest
from ctxreuse.codec.card_bytes import card_digest, read_card, write_card
from ctxreuse.codec.codec import Codec
from ctxreuse.codec.levels import LevelInfo, LevelName, parse_level
from ctxreuse.codec.shelf import Shelf

__all__ = [
    "Card",
    "CardLevel",
    "ChannelGroup",
    "Codec",
    "Coding",
    "LevelInfo",
    "LevelName",
    "PlaneCard",
    "Rope",
    "Shelf",
    "card_digest",
    "model_digest",
    "parse_level",
    "read_card",
    "write_card",
]
