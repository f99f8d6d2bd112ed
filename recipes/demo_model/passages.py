"""Longer texts and their parts: stories, poems, jokes, the future of AI, tips, code."""

from recipes.demo_model.listing import listed

HEROES = [
    "a little fox", "a brave mouse", "a kind robot", "a young girl", "a small dragon",
    "a curious cat", "an old fisherman", "a clever crow", "a shy turtle", "a lonely king",
    "a boy", "a tiny owl", "a wise old woman", "a friendly bear", "a lost puppy",
]  # fmt: skip
HERO_NAMES = listed(
    "Milo Luna Pip Nora Otto Ruby Finn Tilly Bruno Mina Leo Daisy Hugo Ella Max",
)
SETTINGS = [
    "in a quiet forest", "by the sea", "on a high mountain", "in a small village",
    "at the edge of a big city", "near a deep blue lake", "in an old lighthouse",
    "on a little farm", "in a garden full of flowers", "under a tall oak tree",
]  # fmt: skip
WISHES = [
    ("wanted to see the stars up close", "climbed the highest hill", "saw the whole night sky"),
    ("was looking for a friend", "helped a stranger on the road", "found a friend for life"),
    ("dreamed of learning to fly", "built wings from leaves", "flew for one short, happy moment"),
    ("had lost a golden key", "followed a trail of small lights", "found the key under a stone"),
    ("wanted to hear the song of the river", "walked for three days", "heard the water sing"),
    ("was afraid of the dark", "lit a small lamp", "learned that the night is gentle"),
    ("wished for snow in summer", "asked the wind for help", "woke up in a white world"),
    ("wanted to bake the best bread", "tried again and again", "shared warm bread with everyone"),
    ("heard a strange noise every night", "went out to look", "found a lost kitten"),
    ("wanted to plant a tree", "carried water every morning", "sat in its shade years later"),
]  # fmt: skip
MORALS = [
    "From that day on, nobody was lonely there.", "And they all lived happily ever after.",
    "It was the best day of the year.", "Everyone remembered that day for a long time.",
    "Small steps, it turned out, can lead far.", "And that night everybody slept well.",
]  # fmt: skip

HAIKU: dict[str, str] = {
    "spring": "Soft rain on new leaves\nA small bird begins to sing\nThe garden wakes up",
    "summer": "Long light on the hills\nBees hum over warm clover\nThe day will not end",
    "autumn": "Red leaves drift and fall\nThe wind carries them away\nA quiet goodbye",
    "winter": "Snow on silent roofs\nOne lamp glows behind the glass\nThe whole town is still",
    "the sea": "Waves come and waves go\nThe moon pulls a silver thread\nSalt upon the wind",
    "the moon": "Pale lamp of the night\nYou follow me down the road\nAnd ask for nothing",
    "rain": "Rain taps on the roof\nA slow song without a word\nI listen and rest",
    "a cat": "Warm cat on my knees\nHer small motor hums and hums\nI cannot get up",
    "mountains": "Old stone, cold and high\nClouds rest upon your shoulders\nYou do not notice",
    "coffee": "Steam curls from the cup\nThe first sip opens my eyes\nMorning can begin",
    "computers": "Small lights blink at night\nNumbers run along the wires\nThe answer appears",
    "the forest": "Green light through the trees\nMoss is soft under my feet\n"
    "An owl turns its head",
    "a river": "Clear water runs on\nIt never asks for the way\nStones make way for it",
    "programming": "One small bug remains\nI read the same line again\nThere it is at last",
    "the sun": "Gold over the hill\nThe cold field begins to steam\nA new day is here",
}

JOKES = [
    "Why did the computer go to the doctor? Because it had a virus!",
    "Why do programmers prefer dark mode? Because light attracts bugs!",
    "What do you call a bear with no teeth? A gummy bear!",
    "Why was the math book sad? Because it had too many problems.",
    "What do you call a fish without eyes? A fsh!",
    "Why did the chicken cross the road? To get to the other side!",
    "What did one wall say to the other wall? I'll meet you at the corner!",
    "Why can't a bicycle stand up by itself? It is two-tired!",
]

FUTURE_OF_AI = [
    "bright, and it will bring many changes to the way we live and work.",
    "hard to predict, but a few trends are clear.",
    "likely to be shaped by better models, faster hardware and clear rules.",
    "full of new tools that help people learn, create and solve problems.",
]
AI_TRENDS = [
    ("Healthcare", "AI can help doctors find diseases early and choose the right treatment."),
    ("Education", "AI tutors can explain a lesson in many ways, at the speed of each student."),
    ("Science", "AI can search through data and suggest new experiments."),
    ("Transport", "Cars and trains will drive themselves more often and more safely."),
    ("Work", "Routine tasks will be automated, and people will have time for other things."),
    ("Smaller models", "Models will run on phones and laptops, close to the people who use them."),
    ("Safety", "Rules and tests will make sure that AI systems are safe and fair."),
    ("Energy", "More efficient chips will reduce the energy that AI needs."),
    ("Language", "Translation will let people talk to each other in any language."),
    ("Creativity", "Writers, musicians and artists will use AI as a new instrument."),
]

PRESIDENT = [
    "the head of state and head of government of the United States. The president lives in the "
    "White House in Washington, D.C., and is elected for a term of four years.",
    "elected every four years. The president lives in the White House in Washington, D.C., and "
    "leads the government of the country.",
]

TIPS: dict[str, list[tuple[str, str]]] = {
    "staying healthy": [
        ("Balanced Diet", "A balanced diet means eating many kinds of food: vegetables, fruit, "
         "whole grains and some protein. It gives the body the energy and vitamins it needs."),
        ("Regular Exercise", "Regular exercise keeps the heart strong and the mind clear. Walk, "
         "swim or cycle for about thirty minutes on most days of the week."),
        ("Enough Sleep", "Enough sleep helps the body and the mind to recover. Most adults need "
         "seven to nine hours every night."),
        ("Drink Water", "Drinking water through the day helps the whole body to work well."),
        ("Less Stress", "Taking breaks, meeting friends and being outside all reduce stress."),
    ],
    "learning to program": [
        ("Start small", "Start with a small program that does one thing, and make it work."),
        ("Practice daily", "A little practice every day is better than a lot once a month."),
        ("Read code", "Reading good code by other people teaches you new ways to solve a problem."),
        ("Ask questions", "When you are stuck, ask. Explaining a problem often solves it."),
        ("Write tests", "Tests tell you at once when a change breaks something."),
    ],
    "saving money": [
        ("Make a budget", "Write down what you earn and what you spend every month."),
        ("Cook at home", "Cooking at home costs less than eating out and is often healthier."),
        ("Compare prices", "Look at two or three shops before you buy something expensive."),
        ("Wait a day", "Wait a day before a big purchase, and see if you still want it."),
        ("Save first", "Put some money aside at the start of the month, not at the end."),
    ],
    "studying": [
        ("Make a plan", "Decide what to study each day, and begin with the hardest part."),
        ("Take breaks", "Short breaks every half hour help you to stay focused."),
        ("Test yourself", "Asking yourself questions works better than reading again."),
        ("Sleep well", "Sleep helps the brain to keep what you learned."),
        ("Find a quiet place", "A quiet place without a phone makes it easier to focus."),
    ],
    "sleeping better": [
        ("Keep a schedule", "Go to bed and get up at the same time every day."),
        ("No screens", "Put away screens an hour before you go to bed."),
        ("A dark room", "A dark, quiet and cool room helps you to fall asleep."),
        ("Less coffee", "Avoid coffee in the afternoon and in the evening."),
        ("Move", "Exercise during the day makes it easier to sleep at night."),
    ],
}  # fmt: skip

CODE: list[tuple[str, str]] = [
    ("prints hello world", 'print("Hello, world!")'),
    ("adds two numbers", "def add(a, b):\n    return a + b"),
    ("multiplies two numbers", "def multiply(a, b):\n    return a * b"),
    ("subtracts two numbers", "def subtract(a, b):\n    return a - b"),
    ("reverses a string", "def reverse(text):\n    return text[::-1]"),
    ("checks if a number is even", "def is_even(n):\n    return n % 2 == 0"),
    ("checks if a number is odd", "def is_odd(n):\n    return n % 2 == 1"),
    ("returns the largest number in a list", "def largest(numbers):\n    return max(numbers)"),
    ("returns the smallest number in a list", "def smallest(numbers):\n    return min(numbers)"),
    ("sums a list of numbers", "def total(numbers):\n    return sum(numbers)"),
    ("sorts a list", "def sort(items):\n    return sorted(items)"),
    ("counts the words in a text", "def count_words(text):\n    return len(text.split())"),
    ("squares a number", "def square(n):\n    return n * n"),
    ("computes the factorial of a number",
     "def factorial(n):\n    return 1 if n <= 1 else n * factorial(n - 1)"),
    ("computes the Fibonacci numbers",
     "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
     "    return a"),
    ("checks if a word is a palindrome",
     "def is_palindrome(word):\n    return word == word[::-1]"),
    ("converts a string to uppercase", "def upper(text):\n    return text.upper()"),
    ("reads a file", 'def read(path):\n    with open(path) as file:\n        return file.read()'),
    ("counts from 1 to 10", "for number in range(1, 11):\n    print(number)"),
    ("removes duplicates from a list", "def unique(items):\n    return list(dict.fromkeys(items))"),
]  # fmt: skip

# name: house, blood status, occupation, wand wood, core, length, alive, patronus, boggart
CHARACTERS: dict[str, tuple[str, str, str, str, str, str, str, str, str]] = {
    "Harry Potter": ("Gryffindor", "Half-blood", "student", "Holly", "Phoenix feather", "11.0",
                     "Alive", "Stag", "Dementor"),
    "Hermione Granger": ("Gryffindor", "Muggle-born", "student", "Vine", "Dragon heart", "10.75",
                         "Alive", "Otter", "Failure"),
    "Ron Weasley": ("Gryffindor", "Pure-blood", "student", "Willow", "Unicorn hair", "14.0",
                    "Alive", "Terrier", "Spider"),
    "Draco Malfoy": ("Slytherin", "Pure-blood", "student", "Hawthorn", "Unicorn hair", "10.0",
                     "Alive", "None", "Voldemort"),
    "Luna Lovegood": ("Ravenclaw", "Pure-blood", "student", "Unknown", "Unknown", "10.0",
                      "Alive", "Hare", "Unknown"),
    "Cedric Diggory": ("Hufflepuff", "Pure-blood", "student", "Ash", "Unicorn hair", "12.25",
                       "Deceased", "Unknown", "Unknown"),
    "Severus Snape": ("Slytherin", "Half-blood", "teacher", "Unknown", "Unknown", "13.5",
                      "Deceased", "Doe", "Voldemort"),
    "Albus Dumbledore": ("Gryffindor", "Half-blood", "teacher", "Elder", "Thestral hair", "15.0",
                         "Deceased", "Phoenix", "Sister"),
}  # fmt: skip
