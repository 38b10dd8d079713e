-- Write keys, tags and values, in turn in ARGV. Where the counter of the hash began.
-- Read first: whoever may not read is refused before it has written what others wait for.
local epoch = redis.call('HGET', hash, '#e')
for i = 2, #KEYS do write(KEYS[i], ARGV[3 * i - 5], ARGV[3 * i - 4], ARGV[3 * i - 3]) end
return epoch or redis.call('HGET', hash, '#e')
