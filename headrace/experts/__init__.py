"""`headrace experts`: how evenly the experts of a recorded file were used."""
