"""`headrace experts` shows how evenly a mixture-of-experts model used its experts."""
