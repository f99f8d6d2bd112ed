"""English words and blends of them: what to copy, spell and put in upper case.

A model that only copied the words of one list would memorise the list. A blend takes the head of
one word and the tail of another, so blends cover most tokens and never run out.
"""

import re
from random import Random

from recipes.demo_model import passages, words
from recipes.demo_model.definitions import DEFINITIONS
from recipes.demo_model.trivia import TRIVIA

_MORE = """
abandon ability absent academy accent account achieve acoustic acrobat action active actor adapt
adventure advice aircraft album alley almond alphabet amateur amber anchor angle ankle antique
apron arcade archer arena armor arrow artist aspect atlas attic audio author avenue awful axis
backpack bacon bakery balcony balloon bamboo bandage barber barrel battery beach beaver benefit
beyond binder blanket blossom bonus border bottom boulder bracelet brave breeze brick bronze
brother brush bubble bucket buffalo builder bullet bundle burger butcher butter cabin cactus
camel campus candy cannon canvas captain carbon career cargo carol carrot cartoon cascade
cattle caution cavern cement census cereal chamber champion channel chapel charity charm cheese
cherry chimney chorus cinema circus citizen clarity classic climate clinic closet cluster coach
coconut collar comet comfort compass concert copper coral corner cotton council courage cousin
cradle crayon cricket crimson crystal curtain cushion custom cycle damage danger debate decade
decorate deliver dentist deposit desert detail device diamond diary dinner disco distant doctor
domain donkey double dozen drama drawer dream drift driver drummer dungeon dynamo eager early
earth echo eclipse edge editor effort eight elbow elegant eleven embark emerald empire empty
energy enjoy enough entry equal errand escape essay estate evening exact example exotic expert
fabric factor failure falcon fashion fault favor fence ferry fever fiction field figure filter
finger finish fireworks flag flame flavor flight flock flour fluid focus folder fork formal
fortune fossil fountain fragile frame freedom freight frost frozen fruit funnel future galaxy
gallery gamble garlic gather gentle giant ginger glacier glass globe glory glove gold gossip
grape gravity grocery guard guest guide habit hallway handle harbor harvest hazard heaven height
helmet hero hidden hockey hollow honest horizon hotel humble hunter hybrid icicle idea image
impact import index infant injury insect inspire invite iron ivory jaguar jelly jewel journey
judge juice jungle junior kayak kingdom kiosk kiwi knight label labor lagoon lantana laundry
lava lawyer leader leather legend lemon lentil level library limit linen liquid lizard lobster
locker logic lotus luggage lunar luxury magnet mango manual maple marathon margin marine mascot
matter maximum medal melody memory mentor merit method midnight mineral minute mirage mistake
mobile modest monster mosaic motor muffin muscle museum mustard mystery napkin narrow nation
native neon nephew nerve neutral nickel noble noodle normal notice novel number nylon oasis
object ocean octopus office olive onion opera orbit orchard organ origin outfit oxygen paddle
palace panel panther parade parcel pastry patrol peanut pebble pelican penalty pepper perfume
phantom photo picnic pigeon pilot pioneer pirate pistachio plastic plaza pocket poem polite
popcorn portal poster potion powder praise prince prison profit promise puddle pulse pumpkin
puppet purple pyramid quality quarter queen quest quick quiet quilt quiver quota rabbit racket
radar radio raisin ranch random rapid razor recipe record referee reflex region relief remedy
rescue reward rhythm riddle ritual robot rodeo roof rotate royal rubber rumor runway sailor
salmon sample sandal satin sauce scarlet scholar scooter screen season secret select senior
shelter shield shovel shower signal silence silk singer sketch slogan smooth snail soccer social
socket solid sonnet sparrow spider spiral sponge squirrel stable statue steam stereo sticker
storm studio sugar sunset surface survey swallow symbol syrup tablet talent target tavern taxi
temple tennis tender theater thunder timber tomato topaz torch tractor trading trophy tulip
tunnel turbo twelve twin umbrella uncle unicorn union unique update urban useful utopia vacuum
valid vampire vanilla vault vehicle vendor venture victory village vinegar virtue vision vivid
voyage waffle walnut wander warrior wealth weapon weasel welcome whisper wicked willow window
wisdom wizard wolf worker worship wrist xylophone yacht yogurt youth zealous zenith zigzag zipper
zodiac
"""


def _collect() -> tuple[str, ...]:
    texts = [text for _, text in DEFINITIONS] + [item.answer for item in TRIVIA]
    texts += [*passages.HAIKU.values(), *passages.MORALS, *words.OBJECTS, _MORE]
    texts += [text for _, text in passages.AI_TRENDS]
    found = {word for text in texts for word in re.findall(r"[a-z]{3,11}", text)}
    return tuple(sorted(found))


WORDS: tuple[str, ...] = _collect()


def blend(rng: Random) -> str:
    """The head of one word and the tail of another."""
    first, second = rng.choice(WORDS), rng.choice(WORDS)
    head = first[: rng.randint(2, max(2, len(first) - 1))]
    return (head + second[-rng.randint(2, max(2, len(second) - 1)) :])[:12]


def any_word(rng: Random) -> str:
    """A word, a blend, or a few random letters."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(WORDS)
    if kind < 0.9:
        return blend(rng)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 7)))
