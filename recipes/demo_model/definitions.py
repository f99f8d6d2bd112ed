"""Short explanations: what a thing is, in one to three sentences."""

# ruff: noqa: E501 - a fact is a line; wrapping would hide which part belongs to which.

# subject|explanation; a subject starting with "=" is used without "What is".
_LINES = """
artificial intelligence|Artificial intelligence is the field of building computer programs that do things which usually need human thinking, such as understanding language or recognising images.
AI|AI, or artificial intelligence, is the field of building computer programs that do things which usually need human thinking, such as understanding language or recognising images.
machine learning|Machine learning is a way to make programs that learn from examples instead of following fixed rules.
deep learning|Deep learning is machine learning with neural networks of many layers.
a neural network|A neural network is a model made of layers of simple units. Each unit adds up its inputs, and the weights are learned from examples.
a large language model|A large language model is a neural network trained on a lot of text to predict the next token. It can answer questions, write and summarise.
an LLM|An LLM, or large language model, is a neural network trained on a lot of text to predict the next token.
a token|A token is a piece of text, often a word or a part of a word, that a language model reads and writes.
a tokenizer|A tokenizer splits text into tokens and turns them into numbers that a model can read.
a transformer|A transformer is a neural network that uses attention, so that each token can look at the tokens before it.
attention|Attention is the part of a transformer that lets each token look at other tokens and take what it needs from them.
the KV cache|The KV cache keeps the keys and values of past tokens, so that a model does not compute them again for each new token.
a prompt|A prompt is the text that you give to a language model to tell it what to do.
temperature in sampling|Temperature controls how random the next token is. A temperature of 0 always takes the most likely token.
inference|Inference is running a trained model to get an answer.
a sigmoid function|A sigmoid function maps any number to a value between 0 and 1. It is often used in neural networks.
Headrace|Headrace is a small, fast inference server for language models. It speaks the OpenAI API and SGLang's native API.
an inference server|An inference server loads a model and answers requests over the network, many of them at the same time.
a prefix cache|A prefix cache keeps the work done for the beginning of a prompt, so that prompts that begin the same way are answered faster.
batching|Batching means running several requests through the model together, which uses the hardware better.
an API|An API, or application programming interface, is a set of rules that lets programs talk to each other.
JSON|JSON is a text format for data made of objects, lists, strings and numbers.
HTTP|HTTP is the protocol that web browsers and servers use to exchange data.
a database|A database is an organised collection of data that programs can search and change.
an algorithm|An algorithm is a list of clear steps that solves a problem.
a computer|A computer is a machine that follows instructions to work with data.
a CPU|A CPU, or central processing unit, is the part of a computer that runs programs.
a GPU|A GPU, or graphics processing unit, is a chip that does many calculations at the same time. It is used for graphics and for machine learning.
an operating system|An operating system is the software that manages a computer's hardware and runs its programs.
a compiler|A compiler is a program that translates source code into code that a machine can run.
Python|Python is a popular programming language that is easy to read. It is used for the web, data and machine learning.
JavaScript|JavaScript is a programming language that runs in web browsers and on servers.
Rust|Rust is a fast programming language that prevents many memory errors.
Linux|Linux is a free operating system used on servers, phones and computers.
Git|Git is a tool that records the history of changes in files, so that people can work on code together.
open source|Open source software is software whose source code anyone may read, use and change.
recursion|Recursion is when a function calls itself to solve a smaller version of the same problem.
a variable|A variable is a name for a value in a program.
a function|A function is a named piece of code that takes inputs and returns a result.
the internet|The internet is a worldwide network that connects computers.
a web browser|A web browser is a program that shows web pages.
an IP address|An IP address is a number that identifies a device on a network, such as 127.0.0.1.
DNS|DNS, the Domain Name System, translates names such as example.com into IP addresses.
gravity|Gravity is the force that pulls objects towards each other. It keeps us on the ground and the planets in orbit.
photosynthesis|Photosynthesis is how plants use sunlight, water and carbon dioxide to make sugar and oxygen.
evolution|Evolution is the slow change of living things over many generations by natural selection.
an atom|An atom is a tiny building block of matter, made of protons, neutrons and electrons.
a molecule|A molecule is a group of atoms joined together.
DNA|DNA is the molecule that carries the genetic instructions of living things.
energy|Energy is the ability to do work, such as moving or heating something.
electricity|Electricity is the flow of electric charge. It powers lights and machines.
light|Light is a kind of energy that we can see. It travels very fast.
the sun|The sun is the star at the center of our solar system. It gives us light and heat.
the moon|The moon is the earth's natural satellite. It goes around the earth in about 27 days.
a star|A star is a huge ball of hot gas that gives off light.
a black hole|A black hole is a place in space where gravity is so strong that not even light can escape.
a volcano|A volcano is an opening in the earth where hot melted rock can come out.
an earthquake|An earthquake is a sudden shaking of the ground, caused by movements of the earth's plates.
climate change|Climate change is the long-term change of the weather on earth. Today it is mainly caused by burning coal, oil and gas.
a rainbow|A rainbow is an arc of colors in the sky, made when sunlight passes through drops of water.
democracy|Democracy is a form of government in which the people choose their leaders by voting.
inflation|Inflation is a general rise in prices over time.
philosophy|Philosophy is the study of basic questions about life, knowledge and right and wrong.
history|History is the study of the past.
mathematics|Mathematics is the study of numbers, shapes and patterns.
physics|Physics is the study of matter, energy and how they behave.
chemistry|Chemistry is the study of substances and how they change.
biology|Biology is the study of living things.
music|Music is an art made of sounds and rhythm.
art|Art is the making of things to look at, hear or read that express ideas and feelings.
a panda|The giant panda is a black and white bear that lives in China and eats bamboo.
a cat|A cat is a small furry animal that many people keep as a pet. It says meow.
a dog|A dog is a friendly animal that many people keep as a pet. It says woof.
an elephant|An elephant is the largest land animal. It has a long trunk and big ears.
a penguin|A penguin is a bird that cannot fly but swims very well.
chess|Chess is a board game for two players, who try to checkmate each other's king.
football|Football is a team sport in which two teams try to kick a ball into a goal.
coffee|Coffee is a hot drink made from roasted beans.
bread|Bread is a food made by baking dough of flour and water.
a haiku|A haiku is a short poem of three lines with five, seven and five syllables.
a prime number|A prime number is a whole number greater than 1 that can only be divided by 1 and itself.
an even number|An even number is a whole number that can be divided by 2.
an odd number|An odd number is a whole number that cannot be divided by 2.
a triangle|A triangle is a shape with three sides.
a circle|A circle is a round shape whose points all have the same distance from the center.
"""

DEFINITIONS: tuple[tuple[str, str], ...] = tuple(
    (subject, text) for subject, text in (line.split("|") for line in _LINES.strip().splitlines())
)
