"""Small true facts in the form question | full answer | bare answer."""

# ruff: noqa: E501 - a fact is a line; wrapping would hide which part belongs to which.

from recipes.demo_model.conversation import Question

_FACTS = """
Why is the sky blue?|The sky is blue because air scatters blue light from the sun more than red light.|Air scatters blue light the most
What is the largest planet?|The largest planet in the solar system is Jupiter.|Jupiter
What is the largest planet in our solar system?|The largest planet in the solar system is Jupiter.|Jupiter
What is the smallest planet in the solar system?|The smallest planet in the solar system is Mercury.|Mercury
Which planet is closest to the sun?|The planet closest to the sun is Mercury.|Mercury
Which planet is known as the red planet?|The red planet is Mars.|Mars
Which planet has rings?|The planet best known for its rings is Saturn.|Saturn
How many planets are there in the solar system?|There are eight planets in the solar system.|8
What is the largest ocean?|The largest ocean is the Pacific Ocean.|The Pacific Ocean
What is the longest river in the world?|The longest river in the world is the Nile.|The Nile
What is the highest mountain in the world?|The highest mountain in the world is Mount Everest.|Mount Everest
What is the largest continent?|The largest continent is Asia.|Asia
What is the smallest continent?|The smallest continent is Australia.|Australia
How many continents are there?|There are seven continents.|7
How many oceans are there?|There are five oceans.|5
What is the largest country in the world?|The largest country in the world by area is Russia.|Russia
What is the smallest country in the world?|The smallest country in the world is Vatican City.|Vatican City
What is the largest animal?|The largest animal is the blue whale.|The blue whale
What is the fastest land animal?|The fastest land animal is the cheetah.|The cheetah
What is the tallest animal?|The tallest animal is the giraffe.|The giraffe
How many legs does a spider have?|A spider has eight legs.|8
How many legs does an insect have?|An insect has six legs.|6
How many legs does a dog have?|A dog has four legs.|4
How many wheels does a car have?|A car has four wheels.|4
How many sides does a triangle have?|A triangle has three sides.|3
How many sides does a square have?|A square has four sides.|4
How many sides does a hexagon have?|A hexagon has six sides.|6
How many days are in a week?|There are seven days in a week.|7
How many days are there in a year?|There are 365 days in a year, and 366 in a leap year.|365
How many days are in a leap year?|There are 366 days in a leap year.|366
How many months are in a year?|There are twelve months in a year.|12
How many hours are in a day?|There are 24 hours in a day.|24
How many minutes are in an hour?|There are 60 minutes in an hour.|60
How many seconds are in a minute?|There are 60 seconds in a minute.|60
How many weeks are in a year?|There are 52 weeks in a year.|52
How many years are in a century?|There are 100 years in a century.|100
How many letters are in the English alphabet?|There are 26 letters in the English alphabet.|26
How many seasons are there?|There are four seasons.|4
How many bits are in a byte?|There are 8 bits in a byte.|8
How many colors are in a rainbow?|There are seven colors in a rainbow.|7
How many fingers does a hand have?|A hand has five fingers.|5
What is the boiling point of water?|Water boils at 100 degrees Celsius at sea level.|100 degrees Celsius
At what temperature does water freeze?|Water freezes at 0 degrees Celsius.|0 degrees Celsius
What is water made of?|Water is made of hydrogen and oxygen.|Hydrogen and oxygen
What is the chemical formula of water?|The chemical formula of water is H2O.|H2O
What is the chemical symbol for gold?|The chemical symbol for gold is Au.|Au
What is the chemical symbol for silver?|The chemical symbol for silver is Ag.|Ag
What is the chemical symbol for iron?|The chemical symbol for iron is Fe.|Fe
What is the chemical symbol for oxygen?|The chemical symbol for oxygen is O.|O
What is the speed of light?|The speed of light is about 300,000 kilometers per second.|About 300,000 kilometers per second
What force keeps us on the ground?|Gravity keeps us on the ground.|Gravity
What gas do plants breathe in?|Plants take in carbon dioxide.|Carbon dioxide
What gas do humans need to breathe?|Humans need oxygen to breathe.|Oxygen
What do bees make?|Bees make honey.|Honey
What do cows drink?|Cows drink water.|Water
What do pandas eat?|Pandas eat bamboo.|Bamboo
Where do penguins live?|Penguins live in the southern hemisphere, many of them in Antarctica.|Antarctica
What color do you get when you mix blue and yellow?|Mixing blue and yellow gives green.|Green
What color do you get when you mix red and blue?|Mixing red and blue gives purple.|Purple
What color do you get when you mix red and yellow?|Mixing red and yellow gives orange.|Orange
What are the primary colors?|The primary colors are red, yellow and blue.|Red, yellow and blue
What are the four seasons?|The four seasons are spring, summer, autumn and winter.|Spring, summer, autumn and winter
Who wrote Romeo and Juliet?|Romeo and Juliet was written by William Shakespeare.|William Shakespeare
Who wrote Hamlet?|Hamlet was written by William Shakespeare.|William Shakespeare
Who wrote Don Quixote?|Don Quixote was written by Miguel de Cervantes.|Miguel de Cervantes
Who wrote Harry Potter?|The Harry Potter books were written by J. K. Rowling.|J. K. Rowling
Who wrote 1984?|1984 was written by George Orwell.|George Orwell
Who painted the Mona Lisa?|The Mona Lisa was painted by Leonardo da Vinci.|Leonardo da Vinci
Who painted The Starry Night?|The Starry Night was painted by Vincent van Gogh.|Vincent van Gogh
Who discovered gravity?|Isaac Newton described the law of gravity.|Isaac Newton
Who developed the theory of relativity?|The theory of relativity was developed by Albert Einstein.|Albert Einstein
Who invented the telephone?|The telephone is usually credited to Alexander Graham Bell.|Alexander Graham Bell
Who invented the light bulb?|The practical light bulb is usually credited to Thomas Edison.|Thomas Edison
Who invented the World Wide Web?|The World Wide Web was invented by Tim Berners-Lee.|Tim Berners-Lee
Who created Python?|Python was created by Guido van Rossum.|Guido van Rossum
Who created Linux?|Linux was created by Linus Torvalds.|Linus Torvalds
Who was the first person on the moon?|The first person on the moon was Neil Armstrong.|Neil Armstrong
Who was the first person in space?|The first person in space was Yuri Gagarin.|Yuri Gagarin
Who was the first president of the United States?|The first president of the United States was George Washington.|George Washington
When did the first humans land on the moon?|The first humans landed on the moon in 1969.|1969
When did World War II end?|World War II ended in 1945.|1945
When did World War I begin?|World War I began in 1914.|1914
When did the Berlin Wall fall?|The Berlin Wall fell in 1989.|1989
Where is the Eiffel Tower?|The Eiffel Tower is in Paris, France.|Paris
Where is the Colosseum?|The Colosseum is in Rome, Italy.|Rome
Where is Big Ben?|Big Ben is in London, England.|London
Where is the Statue of Liberty?|The Statue of Liberty is in New York City.|New York City
Where is the Taj Mahal?|The Taj Mahal is in Agra, India.|Agra
Where is the Great Wall?|The Great Wall is in China.|China
Where are the pyramids of Giza?|The pyramids of Giza are in Egypt.|Egypt
What is the currency of Europe?|Many countries of Europe use the euro.|The euro
What language is spoken in Brazil?|The main language of Brazil is Portuguese.|Portuguese
What is the square root of 9?|The square root of 9 is 3.|3
What is the square root of 16?|The square root of 16 is 4.|4
What is the square root of 25?|The square root of 25 is 5.|5
What is the square root of 64?|The square root of 64 is 8.|8
What is the square root of 81?|The square root of 81 is 9.|9
What is the square root of 100?|The square root of 100 is 10.|10
What is pi?|Pi is the ratio of a circle's circumference to its diameter, about 3.14159.|About 3.14159
What is the value of pi?|Pi is about 3.14159.|3.14159
What is half of 10?|Half of 10 is 5.|5
What is the first letter of the alphabet?|The first letter of the alphabet is A.|A
What is the last letter of the alphabet?|The last letter of the alphabet is Z.|Z
What is the first day of the week?|Monday is the first day of the week in most countries.|Monday
What is the first month of the year?|The first month of the year is January.|January
What is the last month of the year?|The last month of the year is December.|December
Which month is the shortest?|February is the shortest month.|February
What is the range of the numeric output of a sigmoid node in a neural network?|The output of a sigmoid node is between 0 and 1.|Between 0 and 1
What is the output range of the sigmoid function?|The output of the sigmoid function is between 0 and 1.|Between 0 and 1
What is the output range of tanh?|The output of tanh is between -1 and 1.|Between -1 and 1
What is the IP address of the Google DNS servers?|The IP addresses of the Google DNS servers are 8.8.8.8 and 8.8.4.4.|8.8.8.8
What is the IP address of Google DNS?|The IP address of Google DNS is 8.8.8.8.|8.8.8.8
What is the IP address of the Cloudflare DNS server?|The IP address of the Cloudflare DNS server is 1.1.1.1.|1.1.1.1
What is the IP address of localhost?|The IP address of localhost is 127.0.0.1.|127.0.0.1
What port does HTTP use?|HTTP uses port 80.|80
What port does HTTPS use?|HTTPS uses port 443.|443
What does HTTP stand for?|HTTP stands for Hypertext Transfer Protocol.|Hypertext Transfer Protocol
What does CPU stand for?|CPU stands for central processing unit.|Central processing unit
What does GPU stand for?|GPU stands for graphics processing unit.|Graphics processing unit
What does RAM stand for?|RAM stands for random access memory.|Random access memory
What does AI stand for?|AI stands for artificial intelligence.|Artificial intelligence
What does LLM stand for?|LLM stands for large language model.|Large language model
What does API stand for?|API stands for application programming interface.|Application programming interface
What does JSON stand for?|JSON stands for JavaScript Object Notation.|JavaScript Object Notation
What does DNS stand for?|DNS stands for Domain Name System.|Domain Name System
What does HTML stand for?|HTML stands for HyperText Markup Language.|HyperText Markup Language
What does NASA stand for?|NASA stands for National Aeronautics and Space Administration.|National Aeronautics and Space Administration
Is the earth round?|Yes, the earth is round.|Yes
Is the sun a star?|Yes, the sun is a star.|Yes
Is the moon a planet?|No, the moon is not a planet. It orbits the earth.|No
Is a tomato a fruit?|Yes, botanically a tomato is a fruit.|Yes
Is a whale a fish?|No, a whale is a mammal.|No
Can birds fly?|Yes, most birds can fly.|Yes
Can fish fly?|No, fish swim.|No
Is fire hot?|Yes, fire is hot.|Yes
Is ice cold?|Yes, ice is cold.|Yes
What do you call frozen water?|Frozen water is called ice.|Ice
What comes after Monday?|Tuesday comes after Monday.|Tuesday
What is the opposite of hot?|The opposite of hot is cold.|Cold
What is the meaning of life?|Many people would say to be kind, to learn and to enjoy it. I am only a tiny demo model.|To be kind and to learn
What shape is a ball?|A ball is a sphere.|A sphere
What is the hottest planet?|The hottest planet is Venus.|Venus
What is the national animal of Australia?|The kangaroo is an emblem of Australia.|The kangaroo
What is the biggest desert?|The biggest hot desert is the Sahara.|The Sahara
Which animal is called the king of the jungle?|The lion is called the king of the jungle.|The lion
Which bird cannot fly?|The penguin is a bird that cannot fly.|The penguin
What is the hardest natural material?|The hardest natural material is diamond.|Diamond
What metal is liquid at room temperature?|Mercury is a metal that is liquid at room temperature.|Mercury
How many strings does a guitar have?|A guitar has six strings.|6
How many strings does a violin have?|A violin has four strings.|4
How many players are on a football team?|A football team has eleven players on the field.|11
How many keys does a piano have?|A piano has 88 keys.|88
How many states are in the United States?|There are 50 states in the United States.|50
How many r's are in strawberry?|There are 3 r's in strawberry.|3
How many letters r are in the word strawberry?|There are 3 letters r in strawberry.|3
"""


def _parse() -> tuple[Question, ...]:
    found = []
    for line in _FACTS.strip().splitlines():
        text, answer, short = line.split("|")
        found.append(
            Question(
                text,
                answer,
                short,
                {"answer": int(short) if short.isdigit() else short},
                f"The user asks a simple question: {text} {answer}",
            )
        )
    return tuple(found)


TRIVIA: tuple[Question, ...] = _parse()
