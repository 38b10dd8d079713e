-- Delete what another program has written in the place of the run's hash.
local held = redis.pcall('HLEN', hash)
if type(held) == 'table' and string.find(held.err, 'WRONGTYPE') then redis.call('DEL', hash) end
