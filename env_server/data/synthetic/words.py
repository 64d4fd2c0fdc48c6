"""The words that text cells are made of, shared by all domains.

The pools are deliberately small: a whole-word tokenizer over everything the generator can write must stay below
about 1,300 words. Proper names are capitalised, everything else is lower case. No pool holds a word twice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pool:
    """A source of text values: a word of `first`, in a share `both` of the columns followed by one of `second`."""

    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    both: float = 0.0


def pool(text: str) -> Pool:
    """Return the pool of the words of `text`."""
    return Pool(tuple(text.split()))


FIRST_NAMES = pool(
    """Ada Adam Agnes Alice Amir Anna Anton Ben Bianca Boris Bruno Carla Chloe Clara Daniel
    David Diana Dora Edgar Elena Eli Emma Eric Eva Felix Fiona Frank Freya Gina Grace Greta Hana Hans Hugo
    Ian Ida Igor Ivan Jack Jana Julia Karl Lars Laura Lena Leo Lucia Luis Maria Marco Marta Max
    Mina Nadia Nina Noah Nora Olga Omar Oscar Paula Pedro Petra Rita Rosa Samir Sara Simon Tara Tom Vera Yuki"""
).first
LAST_NAMES = pool(
    """Baker Berg Bishop Blake Carter Chen Cole Costa Cruz Diaz Ellis Evans Fischer Flores
    Ford Garcia Grant Hall Hayes Hill Ito Keller Khan Klein Lang Lopez Meyer Moore Moreno Novak Olsen
    Park Patel Perez Reed Rossi Sato Silva Stone Torres Weber Young"""
).first
PEOPLE = Pool(FIRST_NAMES, LAST_NAMES, both=0.25)
CITIES = pool(
    """Oslo Paris Rome Madrid Lisbon Vienna Prague Athens Dublin London Berlin Munich Zurich Geneva Milan Turin
    Naples Porto Seville Lyon Bergen Cairo Tunis Lagos Nairobi Delhi Mumbai Tokyo Osaka Kyoto Seoul Hanoi Lima
    Quito Bogota Havana Boston Denver Austin Toronto"""
)
COUNTRIES = pool(
    """Norway France Italy Spain Portugal Austria Greece Ireland Germany Poland Egypt Kenya Nigeria India Japan
    Korea Vietnam Peru Chile Brazil Cuba Mexico Canada Turkey Morocco"""
)
_TITLE_STARTS = pool(
    """Silent Golden Broken Hidden Crimson Distant Electric Frozen Gentle Hollow Last Lonely Lost Midnight Northern
    Quiet Sacred Secret Velvet Wild"""
).first
_TITLE_ENDS = pool(
    """River Garden Mirror Ocean Shadow Winter Summer Mountain Forest Harbor Island Journey Letter Moon Palace Road
    Storm Song Tower Window"""
).first
TITLES = Pool(_TITLE_STARTS, _TITLE_ENDS, both=1.0)
PLACES = pool(
    """Aurora Bellevue Cascade Delta Everest Fortuna Gemini Horizon Iris Jupiter Karma Lotus Meridian Nova Orion
    Phoenix Riviera Solaris Triton Vertex Willow Zenith"""
)
TEAMS = pool(
    """Tigers Eagles Sharks Wolves Bears Lions Hawks Falcons Panthers Dragons Giants Knights Pirates Rangers
    Rockets Vikings Comets Cobras"""
)
PETS = pool(
    """Rex Milo Luna Bella Rocky Coco Daisy Buddy Simba Nala Oreo Pepper Ginger Shadow Ziggy Misty Bandit Biscuit
    Cookie Duke Hazel Jasper Maple Olive Peanut Ruby Rusty Smokey Sunny Teddy"""
)
SUBJECTS = pool(
    """algebra geometry biology chemistry physics history geography literature music drama painting logic
    statistics economics grammar latin astronomy ethics"""
)
PRODUCTS = pool(
    """lamp chair table desk sofa mirror clock carpet kettle toaster blender camera radio laptop keyboard printer
    backpack jacket sweater scarf gloves boots helmet tent bicycle guitar puzzle notebook pencil umbrella"""
)
DISHES = pool(
    """pasta pizza risotto lasagna soup salad curry noodles dumplings sushi ramen tacos burger steak stew omelette
    pancakes paella kebab falafel hummus brownie cheesecake pudding"""
)
CROPS = pool(
    "wheat barley corn rice oats rye potatoes carrots onions tomatoes peppers beans peas lettuce cabbage garlic"
)
CAR_MODELS = pool(
    """Astra Bravo Civic Corsa Fabia Fiesta Focus Golf Ibiza Jazz Leon Logan Micra Panda Passat Polo Punto Swift
    Tipo Twingo Yaris Zafira"""
)
PLANES = pool("Albatross Condor Heron Kestrel Osprey Pelican Raven Robin Sparrow Swallow Swan Tern Wren")
DEPARTMENTS = pool(
    "sales marketing finance research support legal design security logistics training quality purchasing"
)
PROJECTS = pool("Apollo Atlas Beacon Cobalt Compass Ember Falcon Helios Mercury Nimbus Onyx Orbit Pulse Saturn Titan")
WORKOUTS = pool("yoga pilates boxing spinning rowing zumba crossfit karate judo swimming climbing")
REPAIRS = pool("brakes battery tires clutch exhaust engine lights gearbox filter radiator windshield")
COLORS = pool("red blue green black white brown gray yellow")
STATUSES = pool("open closed pending cancelled finished")
PRIORITIES = pool("low normal high urgent")
SEASONS = pool("spring summer autumn winter")
DAYS = pool("monday tuesday wednesday thursday friday saturday sunday")
LEVELS = pool("beginner intermediate advanced expert")
PAYMENTS = pool("cash card transfer voucher check")
TIERS = pool("bronze silver gold platinum")
