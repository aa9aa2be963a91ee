"""Constrained decoding: an answer that a grammar allows, token by token, by llguidance."""

from ctxreuse.constrain.compiler import Constraint, GrammarCompiler
from ctxreuse.constrain.grammar import Grammar
from ctxreuse.constrain.vocabulary import HasVocabulary, Vocabulary

__all__ = ["Constraint", "Grammar", "GrammarCompiler", "HasVocabulary", "Vocabulary"]
