-- All keys that begin with ARGV[1], each followed by what is stored.
local found, fields = {}, redis.call('HGETALL', hash)
local prefix, n = '=' .. ARGV[1], 0
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, #prefix) == prefix then
    found[n + 1], found[n + 2], n = string.sub(fields[i], 2), fields[i + 1], n + 2
  end
end
return found
