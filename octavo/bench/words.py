"""Text to fill prompts with, written for this purpose: common words, and lines of verse put together from parts."""

from __future__ import annotations

import random

# Frequent English words: nearly every tokenizer has each of them, after a space, as one token.
WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you were all "
    "her she there would their we him been has when who will no more if out so up said what its about than into them can only other "
    "time new some could these two may first then do any like my now over such our man me even most made after also did many before "
    "must through years where much your way well down should because long each just those people how too little state good very make "
    "world still see own work men here between both life being under day same another know while last might us great year come since "
    "against right take used three few place part water house small number always away again off went old thought night end called "
    "next line group left large second city hand high name side given set point white family course later early days order light book "
    "form open far air history power half land need letter music room table river story green blue glass stone paper winter summer "
    "garden window silver golden quiet morning evening mountain valley village market bridge harbor island forest meadow shadow"
).split()

_SUBJECTS = (
    "The patient tide|A lantern by the door|The baker's youngest son|An old and crooked pine|The swallow under eaves|My grandmother's "
    "blue cup|The ferry's weary bell|A map without a name|The last of autumn's light|Some letter never sent|The kettle on the stove|A "
    "sparrow in the hedge|The orchard after rain|One button on the sill|The miller's silent wheel|A child who counts the stars"
).split("|")
_VERBS = (
    "remembers|carries home|will not forget|has traded for|sings softly of|leans close to hear|forgives|keeps watch above|mistakes for "
    "gold|unravels by|lays down beside|returns at dusk to|dreams about|has borrowed from|wakes early for|grows pale beneath"
).split("|")
_OBJECTS = (
    "the harbor's thinning smoke|a road that bends to sea|the weight of borrowed years|a garden gone to seed|the hush before the snow|an "
    "answer half aloud|the colour of the hills|a coat with mended sleeves|the river's second voice|a clock that lost its hands|the salt "
    "upon the stones|a neighbour's open gate|the moon inside the well|a promise made in spring|the dust of summer roads|a song that has "
    "no end"
).split("|")
_ENDS = (".", ",", ";", " —", "?", ":")

POEM_TASK = "Pick as many lines as you can from these lines of verse:\n"


def verse(rng: random.Random) -> str:
    """One line, about a dozen tokens long; there are 24,576 of them."""
    return f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)}{rng.choice(_ENDS)}\n"
