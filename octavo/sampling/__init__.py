"""Logits → tokens, a feature a file.

What happens to a row's logits, in this order (vLLM's order; transformers' processors, composed so, give the same):

     0  raw log-probabilities are taken from the unmodified logits            logprobs.py
     1  grammar (structured outputs): what it does not allow: -inf           grammar.py
     2  allowed_token_ids      everything else becomes -inf                   masks.py
     3  bad_words              a token that would complete one: -inf          masks.py
     4  logit_bias             added                                          masks.py
     5  min_tokens             EOS and stop ids: -inf until it is reached     masks.py
     6  repetition_penalty     over prompt and output tokens                  penalties.py
     7  frequency_penalty, presence_penalty, over output tokens               penalties.py
     8  temperature            divides; 0 takes the argmax and ends here      sampler.py
     9  min_p, top_k, top_p    each on what the one before left               truncation.py
    10  one draw               first token, by id, whose CDF exceeds u        truncation.py, random.py

Ties: tokens are ordered by (logit descending, id ascending). top_k keeps exactly k of that order, top_p its shortest
prefix that holds the mass, greedy its first; so top_k=1 is greedy.
"""
