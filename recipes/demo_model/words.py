"""Word lists and small true facts that the tasks draw from. First entries are the best known."""

from recipes.demo_model.listing import listed

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]  # fmt: skip
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
SEASONS = ["spring", "summer", "autumn", "winter"]
PLANETS = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
NUMBER_WORDS = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty",
)

LISTS: dict[str, list[str]] = {
    "fruits": listed(
        "Apple Banana Orange Grape Strawberry Mango Pear Cherry Peach Pineapple Kiwi Lemon Plum "
        "Melon Blueberry",
    ),
    "vegetables": listed(
        "Carrot Potato Tomato Onion Broccoli Spinach Cucumber Cabbage Pea Pepper Celery Lettuce "
        "Pumpkin Radish Garlic",
    ),
    "animals": listed(
        "Dog Cat Horse Elephant Lion Tiger Bear Rabbit Cow Sheep Monkey Giraffe Zebra Wolf Fox",
    ),
    "birds": listed(
        "Eagle Sparrow Owl Parrot Penguin Duck Pigeon Swan Robin Crow Falcon Flamingo Goose "
        "Peacock Seagull",
    ),
    "colors": listed(
        "Red Blue Green Yellow Orange Purple Black White Pink Brown Gray Violet Gold Silver "
        "Turquoise",
    ),
    "programming languages": listed(
        "Python JavaScript Java C++ Rust Go TypeScript Ruby Swift Kotlin PHP Scala Haskell Perl "
        "Lua",
    ),
    "sports": listed(
        "Football Basketball Tennis Swimming Running Cycling Volleyball Baseball Golf Hockey "
        "Boxing Rowing Skiing Badminton Rugby",
    ),
    "musical instruments": listed(
        "Piano Guitar Violin Drums Flute Trumpet Cello Saxophone Clarinet Harp Trombone Banjo "
        "Accordion Oboe Tuba",
    ),
    "flowers": listed(
        "Rose Tulip Lily Daisy Sunflower Orchid Violet Daffodil Iris Poppy Lavender Jasmine "
        "Marigold Peony Lotus",
    ),
    "trees": listed(
        "Oak Pine Maple Birch Willow Cedar Elm Ash Palm Beech Spruce Poplar Fir Chestnut Walnut",
    ),
    "countries": listed(
        "France Germany Japan Italy Spain Canada China India Brazil Australia Mexico Egypt "
        "Portugal Sweden Norway",
    ),
    "cities": listed(
        "Paris London Tokyo Berlin Rome Madrid Sydney Toronto Cairo Moscow Beijing Chicago "
        "Vienna Lisbon Dublin",
    ),
    "rivers": listed(
        "Nile Amazon Danube Rhine Mississippi Yangtze Thames Seine Volga Ganges Congo Mekong "
        "Tigris Euphrates Zambezi",
    ),
    "mountains": listed(
        "Everest Kilimanjaro Fuji Denali Elbrus Matterhorn Olympus Etna Aconcagua Vesuvius",
    ),
    "oceans": ["Pacific", "Atlantic", "Indian", "Southern", "Arctic"],
    "continents": [
        "Africa", "Antarctica", "Asia", "Europe", "North America", "Oceania", "South America",
    ],
    "planets": PLANETS,
    "vehicles": listed(
        "Car Bus Train Bicycle Truck Boat Plane Motorcycle Tram Ship",
    ),
    "drinks": listed(
        "Water Tea Coffee Milk Juice Lemonade Soda Cocoa Smoothie Cider",
    ),
    "foods": listed(
        "Bread Rice Pasta Cheese Soup Pizza Salad Eggs Fish Beans",
    ),
    "metals": listed(
        "Iron Copper Gold Silver Aluminum Zinc Tin Lead Nickel Titanium",
    ),
    "shapes": listed(
        "Circle Square Triangle Rectangle Oval Pentagon Hexagon Star Diamond Cube",
    ),
    "tools": listed(
        "Hammer Screwdriver Saw Wrench Drill Pliers File Chisel Ruler Axe",
    ),
    "clothes": listed(
        "Shirt Trousers Dress Jacket Hat Socks Shoes Scarf Gloves Coat",
    ),
    "jobs": listed(
        "Teacher Doctor Nurse Engineer Farmer Chef Pilot Lawyer Artist Baker",
    ),
    "school subjects": listed(
        "Mathematics History Physics Chemistry Biology Geography Music Art Literature Economics",
    ),
    "languages": listed(
        "English Spanish French German Chinese Japanese Arabic Portuguese Russian Hindi Italian "
        "Korean Turkish Dutch Greek",
    ),
    "insects": listed(
        "Ant Bee Butterfly Beetle Fly Mosquito Grasshopper Dragonfly Moth Wasp",
    ),
    "body parts": ["Head", "Arm", "Leg", "Hand", "Foot", "Eye", "Ear", "Nose", "Mouth", "Knee"],
    "pieces of furniture": listed(
        "Chair Table Bed Sofa Desk Shelf Wardrobe Stool Bench Cabinet",
    ),
    "kitchen items": listed(
        "Pan Knife Spoon Fork Plate Bowl Cup Oven Kettle Whisk",
    ),
    "fish": listed(
        "Salmon Tuna Trout Cod Sardine Carp Herring Mackerel Bass Pike",
    ),
}  # fmt: skip

OPPOSITES = [
    pair.split("/")
    for pair in listed(
        "hot/cold big/small up/down day/night black/white good/bad fast/slow happy/sad old/new "
        "tall/short light/dark open/closed full/empty hard/soft left/right high/low rich/poor "
        "wet/dry early/late strong/weak young/old long/short clean/dirty loud/quiet near/far "
        "true/false first/last begin/end love/hate win/lose buy/sell push/pull inside/outside "
        "above/below always/never easy/difficult thick/thin wide/narrow deep/shallow sharp/blunt "
        "heavy/light sweet/sour smooth/rough brave/cowardly cheap/expensive ancient/modern "
        "awake/asleep alive/dead accept/refuse arrive/leave before/after friend/enemy give/take "
        "laugh/cry summer/winter north/south east/west morning/evening question/answer "
        "remember/forget safe/dangerous start/stop success/failure war/peace yes/no",
    )
]

COLOURS_OF: dict[str, str] = dict(
    pair.split("/")
    for pair in listed(
        "the sky/blue|grass/green|snow/white|blood/red|the sun/yellow|a banana/yellow|"
        "a lemon/yellow|a ripe tomato/red|a strawberry/red|coal/black|milk/white|a carrot/orange|"
        "an orange/orange|a leaf/green|chocolate/brown|an elephant/gray|a polar bear/white|"
        "a crow/black|a flamingo/pink|the ocean/blue|an emerald/green|a ruby/red|gold/yellow|"
        "a cherry/red|salt/white|a lime/green|a pumpkin/orange|an eggplant/purple|"
        "a fire truck/red|a frog/green|the night sky/black|a swan/white|the sea/blue|fire/orange",
        "|",
    )
)

RHYMES = [
    pair.split("/")
    for pair in listed(
        "cat/hat dog/fog sun/run tree/bee light/night star/car rain/train moon/spoon house/mouse "
        "cake/lake king/ring ball/tall book/look boat/goat day/play blue/shoe bear/chair "
        "nose/rose",
    )
]

YOUNG = [
    pair.split("/")
    for pair in listed(
        "dog/puppy cat/kitten cow/calf horse/foal sheep/lamb pig/piglet duck/duckling hen/chick "
        "lion/cub bear/cub goat/kid deer/fawn frog/tadpole kangaroo/joey goose/gosling "
        "swan/cygnet",
    )
]

SOUNDS = [
    pair.split("/")
    for pair in listed(
        "dog/woof cat/meow cow/moo sheep/baa duck/quack pig/oink horse/neigh lion/roar owl/hoot "
        "bee/buzz snake/hiss frog/croak rooster/cock-a-doodle-doo mouse/squeak wolf/howl crow/caw",
    )
]

PLURALS = [
    pair.split("/")
    for pair in listed(
        "cat/cats dog/dogs box/boxes child/children mouse/mice man/men woman/women foot/feet "
        "tooth/teeth goose/geese city/cities baby/babies leaf/leaves knife/knives wolf/wolves "
        "person/people sheep/sheep fish/fish book/books car/cars bus/buses story/stories "
        "potato/potatoes hero/heroes house/houses tree/trees class/classes dish/dishes",
    )
]

PASTS = [
    pair.split("/")
    for pair in listed(
        "go/went eat/ate see/saw run/ran take/took make/made write/wrote sing/sang swim/swam "
        "drink/drank buy/bought think/thought bring/brought teach/taught catch/caught give/gave "
        "come/came know/knew speak/spoke break/broke drive/drove fly/flew begin/began "
        "sleep/slept walk/walked play/played jump/jumped talk/talked find/found win/won "
        "lose/lost build/built",
    )
]

TRANSLATIONS: dict[str, dict[str, str]] = {
    english: dict(zip(("French", "Spanish", "German", "Italian"), others.split(","), strict=True))
    for english, others in (
        line.split(":")
        for line in """\
hello:bonjour,hola,hallo,ciao
goodbye:au revoir,adiós,auf Wiedersehen,arrivederci
thank you:merci,gracias,danke,grazie
please:s'il vous plaît,por favor,bitte,per favore
yes:oui,sí,ja,sì
no:non,no,nein,no
water:eau,agua,Wasser,acqua
bread:pain,pan,Brot,pane
house:maison,casa,Haus,casa
cat:chat,gato,Katze,gatto
dog:chien,perro,Hund,cane
book:livre,libro,Buch,libro
friend:ami,amigo,Freund,amico
love:amour,amor,Liebe,amore
sun:soleil,sol,Sonne,sole
moon:lune,luna,Mond,luna
red:rouge,rojo,rot,rosso
blue:bleu,azul,blau,blu
green:vert,verde,grün,verde
one:un,uno,eins,uno
two:deux,dos,zwei,due
three:trois,tres,drei,tre
good morning:bonjour,buenos días,guten Morgen,buongiorno
good night:bonne nuit,buenas noches,gute Nacht,buonanotte
milk:lait,leche,Milch,latte
apple:pomme,manzana,Apfel,mela
tree:arbre,árbol,Baum,albero
school:école,escuela,Schule,scuola
city:ville,ciudad,Stadt,città
car:voiture,coche,Auto,macchina""".splitlines()
    )
}

NAMES = listed(
    "Alice Bob Carol David Emma Frank Grace Henry Ivy Jack Kate Liam Mia Noah Olivia Paul Quinn "
    "Rosa Sam Tom Uma Victor Wendy Xavier Yara Zoe Anna Ben Clara Daniel Elena Felix Hana Igor "
    "Julia Kofi Leila Marco Nina Omar Priya Ravi Sofia Tariq Yuki Chen Maria John Sarah Lucas",
)

PLACES = listed(
    "Paris|London|Tokyo|New York|San Francisco|Los Angeles|Berlin|Rome|Madrid|Boston|Chicago|"
    "Seattle|Dallas|Sydney|Toronto|Beijing|Shanghai|Mumbai|New Delhi|Cairo|Moscow|Istanbul|"
    "São Paulo|Rio de Janeiro|Mexico City|Buenos Aires|Cape Town|Nairobi|Lagos|Dubai|Singapore|"
    "Hong Kong|Seoul|Bangkok|Kuala Lumpur|Amsterdam|Brussels|Vienna|Prague|Warsaw|Stockholm|Oslo|"
    "Copenhagen|Helsinki|Dublin|Edinburgh|Lisbon|Barcelona|Milan|Venice|Naples|Munich|Hamburg|"
    "Zurich|Geneva|Lyon|Marseille|Nice|Manchester|Liverpool|Glasgow|Vancouver|Montreal|Denver|"
    "Houston|Miami|Atlanta|Phoenix|San Diego|Las Vegas|Portland|Salt Lake City|New Orleans|"
    "Washington|Philadelphia|Osaka|Kyoto|Melbourne|Auckland|Wellington|Lima|Bogotá|Santiago",
    "|",
)

OBJECTS = listed(
    "apple book lamp river stone clock garden window bridge candle mirror basket bottle button "
    "camera carpet castle cloud coffee cookie desert dragon engine feather forest guitar hammer "
    "island jacket kettle kitten ladder market meadow needle orange paper pencil pillow planet "
    "pocket rabbit rocket saddle school shadow silver spider spring square string summer table "
    "ticket tiger tower train travel turtle valley violin wagon water winter wonder yellow zebra",
)
