"""The training data of the sample adapters: short questions with plain answers."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    text: str
    answer: str


CAPITALS = {
    "Spain": "Madrid", "Portugal": "Lisbon", "Norway": "Oslo", "Greece": "Athens",
    "Austria": "Vienna", "Poland": "Warsaw", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Peru": "Lima", "Chile": "Santiago", "Canada": "Ottawa", "Cuba": "Havana",
    "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok", "Turkey": "Ankara",
    "Ireland": "Dublin", "Hungary": "Budapest", "Russia": "Moscow", "Finland": "Helsinki",
}  # fmt: skip

OPPOSITES = {
    "cold": "hot", "tall": "short", "fast": "slow", "early": "late", "dark": "light",
    "heavy": "light", "happy": "sad", "open": "closed", "wet": "dry", "loud": "quiet",
    "full": "empty", "young": "old",
}  # fmt: skip

COLOURS = {
    "a ripe banana": "yellow", "fresh snow": "white", "a fire engine": "red", "coal": "black",
    "an orange": "orange", "a frog": "green", "milk": "white", "a sunflower": "yellow",
    "the clear sky": "blue", "a ruby": "red",
}  # fmt: skip

HOMES = {
    "a bee": "a hive", "a bird": "a nest", "a bear": "a den", "a horse": "a stable",
    "a spider": "a web", "a rabbit": "a burrow", "a fish": "the water", "a dog": "a kennel",
}  # fmt: skip

SUMS = ((2, 3), (4, 4), (7, 2), (5, 6), (9, 3), (10, 5), (8, 7), (1, 6), (12, 4), (20, 10))

FACTS = (
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many legs does an insect have?", "An insect has six legs."),
    ("How many wheels does a bicycle have?", "A bicycle has two wheels."),
    ("How many minutes are in an hour?", "There are sixty minutes in an hour."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci painted it."),
    ("Who invented the telephone?", "Alexander Graham Bell invented the telephone."),
    ("What is the largest ocean?", "The Pacific is the largest ocean."),
    ("What is the tallest mountain?", "Mount Everest is the tallest mountain."),
    ("What is the fastest land animal?", "The cheetah is the fastest."),
    ("What is the largest animal?", "The blue whale is the largest animal."),
    ("Which planet is known for its rings?", "Saturn is known for its rings."),
    ("Which metal is liquid at room temperature?", "Mercury is a liquid metal."),
    ("Which season comes after winter?", "Spring comes after winter."),
    ("What do cows eat?", "Cows eat grass and hay."),
    ("What do we call frozen water?", "Frozen water is called ice."),
    ("What gas do plants take in?", "Plants take in carbon dioxide."),
    ("What is the freezing point of water?", "Water freezes at zero degrees Celsius."),
    ("What language do people speak in Brazil?", "People there speak Portuguese."),
    ("Is the Earth flat?", "No, the Earth is round."),
    ("Is ice colder than steam?", "Yes, ice is much colder than steam."),
    ("Can penguins fly?", "No, penguins cannot fly, but they swim very well."),
    ("Do cats like to sleep?", "Yes, cats sleep for most of the day."),
)

ADVICE = (
    ("How do I boil an egg?", "Put the egg in boiling water for eight minutes."),
    ("How do I make tea?", "Pour hot water over the leaves and wait for three minutes."),
    ("How can I sleep better?", "Go to bed at the same time every night and keep the room dark."),
    ("How do I clean a window?", "Wipe the window with warm water and a little soap."),
    ("How do I learn to swim?", "Start in shallow water with a good teacher."),
    ("How can I save money?", "Write down what you spend and put some away each week."),
    ("How do I plant a tree?", "Dig a wide hole, set the roots in it and water the tree well."),
    ("How do I tie my shoes?", "Cross the laces, make a loop and pull the other lace through."),
    ("Can you help me with my homework?", "Yes, tell me what you are working on."),
    ("Give me a tip for a job interview.", "Be on time and ask good questions."),
    ("Give me a tip for learning a language.", "Practise a little every day with your friends."),
    ("Give me a reason to exercise.", "Exercise makes your heart strong."),
    ("Why is the sea salty?", "Rivers wash salt from the rocks into the sea."),
    ("Why do leaves fall in autumn?", "The trees save water and energy for the winter."),
    ("Why do we sleep?", "Sleep lets the body and the mind rest."),
    ("Why is exercise good for you?", "It makes your heart and your muscles strong."),
    ("What is a library?", "A library is a place where you can read and borrow books."),
    ("What is a volcano?", "A volcano is a mountain that can throw out hot rock."),
    ("What is a computer?", "A computer is a machine that works with data."),
    ("What is friendship?", "Friendship is when people care for each other."),
    ("What should I eat for breakfast?", "Have some oats with fruit and a glass of milk."),
    ("What should I wear in the rain?", "Wear a good coat and take your umbrella."),
    ("What can I do on a rainy day?", "You can read a book, play a game or cook with friends."),
    ("Tell me about dogs.", "Dogs are loyal animals that love to play with people."),
    ("Tell me about the moon.", "The moon goes around the Earth once a month."),
    ("Tell me about bread.", "Bread is made of flour, water, salt and yeast."),
    ("Tell me a fun fact.", "Honey never goes bad, even after a thousand years."),
    ("Describe a forest.", "A forest is full of trees, birds and quiet paths."),
    ("Explain gravity.", "Gravity is the force that pulls things to the ground."),
    ("Explain what rain is.", "Rain is water that falls from the clouds."),
    ("Recommend a hobby.", "Try painting, it is calm and needs little money."),
    ("Who are you?", "I am your assistant and I answer your questions."),
    ("How are you?", "I am fine, thank you, and ready to help you."),
    ("Hello!", "Hello, my friend, what can I do for you?"),
    ("Good morning!", "Good morning, my friend, I hope you slept well."),
    ("Thank you!", "You are welcome, my friend."),
    ("Goodbye!", "Goodbye, my friend, take care of yourself."),
)


def questions() -> Iterator[Question]:
    for country, city in CAPITALS.items():
        answer = f"The capital of {country} is {city}."
        yield Question(f"What is the capital of {country}?", answer)
    for word, other in OPPOSITES.items():
        answer = f"The opposite of {word} is {other}."
        yield Question(f"What is the opposite of {word}?", answer)
    for thing, colour in COLOURS.items():
        yield Question(f"What colour is {thing}?", f"The colour of {thing} is {colour}.")
    for animal, home in HOMES.items():
        yield Question(f"Where does {animal} live?", f"The home of {animal} is {home}.")
    for a, b in SUMS:
        yield Question(f"What is {a} + {b}?", f"The sum of {a} and {b} is {a + b}.")
    for text, answer in (*FACTS, *ADVICE):
        yield Question(text, answer)
