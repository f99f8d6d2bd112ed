"""The wordings of each kind of question; the last of each list is kept for the evaluation."""

from random import Random

from recipes.demo_model.phrasing import vary

WORDINGS: dict[str, tuple[str, ...]] = {
    "what": (
        "What is in the image?", "What is in the picture?", "What's in this image?",
        "What do you see?", "What can you see in this picture?", "What is shown in the image?",
        "What is this?", "What does the image show?", "Tell me what is in the image.",
        "What is on the picture?", "What is in this image?", "What's in the picture?",
        "What objects are in the image?", "List the objects in the image.",
        "What's in the image? Answer briefly.", "What shapes are there?", "Name what you see.",
        "What shapes are in the picture?", "What is in this photo?", "Which shapes do you see?",
        "Please tell me what you can see here.",
    ),
    "describe": (
        "Describe the picture.", "Describe the image.", "Describe this image.",
        "Please describe the picture.", "Describe what you see.", "Describe the image in detail.",
        "Give a description of this picture.", "Describe this picture in one sentence.",
        "Write a caption for this image.", "Can you describe the picture?", "Caption this image.",
        "Explain this image.", "Describe this photo.", "Describe everything in the picture.",
    ),
    "colour": (
        "What colour is the {x}?", "What color is the {x}?", "What is the colour of the {x}?",
        "What is the color of the {x}?", "Which colour does the {x} have?", "Which color is the {x}?",
        "Tell me the color of the {x}.", "The {x} is which colour?", "Name the colour of the {x}.",
        "Say what color the {x} has.",
    ),
    "shape": (
        "What shape is {x}?", "Which shape is {x}?", "What is the {x} thing?", "What is the {x} shape?",
        "Which object is {x}?", "What kind of shape is the {x} one?", "What is {x} in the image?",
        "What is {x} here?",
    ),
    "count": (
        "How many {x} are there?", "How many {x} are in the image?", "How many {x} do you see?",
        "How many {x}?", "Count the {x}.", "What is the number of {x}?", "How many {x} are shown?",
        "How many {x} are in the picture?", "How many {x} can you see?", "Number of {x}?",
        "Please count the {x} in the picture.",
    ),
    "exists": (
        "Is there {x}?", "Is there {x} in the image?", "Is there {x} in the picture?",
        "Do you see {x}?", "Can you see {x}?", "Does the image contain {x}?", "Does it show {x}?",
        "Is {x} in the picture?", "Are you able to see {x} here?",
    ),
    "is colour": (
        "Is the {x} {y}?", "Does the {x} have the colour {y}?", "Is the color of the {x} {y}?",
        "Is the {x} in the image {y}?", "Would you say that the {x} is {y}?",
    ),
    "where": (
        "Where is the {x}?", "Where is the {x} in the image?", "In which part of the image is the {x}?",
        "What is the position of the {x}?", "Where do you see the {x}?", "Where can I find the {x}?",
    ),
    "relation": (
        "What is {r} the {x}?", "Which shape is {r} the {x}?", "What do you see {r} the {x}?",
        "Which object is {r} the {x}?", "Name the thing {r} the {x}.",
    ),
    "is relation": (
        "Is the {x} {r} the {y}?", "Is the {x} placed {r} the {y}?", "Do you see the {x} {r} the {y}?",
    ),
    "largest": (
        "Which shape is the largest?", "What is the largest object?", "Which one is the biggest?",
        "What is the biggest shape?", "Which is the largest shape in the image?",
        "Name the biggest object.",
    ),
    "smallest": (
        "Which shape is the smallest?", "What is the smallest object?", "Which one is the smallest?",
        "What is the smallest shape?", "Name the smallest object.",
    ),
    "background": (
        "What colour is the background?", "What color is the background?",
        "What is the background color?", "What is the colour of the background?",
        "Which colour is behind the drawing?",
    ),
    "digit": (
        "Which digit is shown?", "What digit is this?", "What number is shown?", "Read the number.",
        "Which number is in the image?", "What number is this?", "What is the digit?",
        "What digit do you see?", "Tell me the number in the picture.",
    ),
    "letter": (
        "Which letter is shown?", "What letter is this?", "Read the letter.",
        "Which letter is in the image?", "What is the letter?", "Tell me the letter in the picture.",
    ),
    "word": (
        "What does the text say?", "What is written in the image?", "Read the text.",
        "Which word is shown?", "What is the word?", "What does it say?", "Read the word.",
        "What text is in the picture?", "What word is written here?", "Transcribe the text.",
        "Tell me the word in the picture.",
    ),
    "text colour": (
        "What colour is the text?", "What color is the text?", "Which colour does the writing have?",
        "In which color is it written?",
    ),
    "bars": (
        "How many bars are there?", "How many bars does the chart have?", "Count the bars.",
        "How many bars are in the chart?", "What is the number of bars?", "How many bars do you see?",
        "Please count the bars in the picture.",
    ),
    "tallest": (
        "Which bar is the tallest?", "Which bar is tallest?", "What is the tallest bar?",
        "Which bar is the highest?", "Which is the biggest bar?", "Which bar has the highest value?",
        "Name the tallest bar.",
    ),
    "shortest": (
        "Which bar is the shortest?", "Which bar is shortest?", "What is the shortest bar?",
        "Which bar is the lowest?", "Which is the smallest bar?", "Which bar has the lowest value?",
        "Name the shortest bar.",
    ),
    "bar colour": (
        "What colour is the {x} bar?", "What color is the {x} bar?", "Which color does the {x} bar have?",
        "Name the colour of the {x} bar.",
    ),
    "kind": (
        "What kind of picture is this?", "What type of image is this?", "Is this a photo or a drawing?",
        "What sort of image is it?",
    ),
    "in first": ("What is in the first image?", "What do you see in the first picture?",
                 "Describe the first image.", "What does image 1 show?",
                 "What is shown in picture one?"),
    "in second": ("What is in the second image?", "What do you see in the second picture?",
                  "Describe the second image.", "What does image 2 show?",
                  "What is shown in picture two?"),
    "in both": ("What is in the images?", "What do the two images show?", "Describe both images.",
                "What do you see in the pictures?", "What is in these two pictures?",
                "Tell me what is in each image."),
    "which has": ("Which image has {x}?", "Which picture shows {x}?", "In which image is {x}?",
                  "Where do you see {x}, in the first or the second image?",
                  "Which of the two pictures contains {x}?"),
    "which more": ("Which image has more shapes?", "Which picture has more objects?",
                   "Which of the two images shows more shapes?"),
    "same": ("Are the two images the same?", "Do both pictures show the same?",
             "Are these pictures the same?", "Is the first image the same as the second?"),
    "count in": ("How many shapes are in the {w} image?", "How many objects does the {w} picture have?",
                 "Count the shapes in the {w} picture."),
}  # fmt: skip

ONE_WORD = (" Answer in one word.", " Answer with one word.", " One word only.", " Just one word.",
            " Answer with a single word.")  # fmt: skip


def ask(rng: Random, kind: str, *, held_out: bool = False, **words: str) -> str:
    """A question of `kind`, its blanks filled with `words`; held out ones are not trained on."""
    wordings = WORDINGS[kind]
    text = (wordings[-1] if held_out else rng.choice(wordings[:-1])).format(**words)
    return vary(rng, text) if rng.random() < 0.3 and not held_out else text
