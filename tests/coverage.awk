# The output of gcov -t for any number of objects -> lines reached of every source file, the least covered first,
# and the total, which must not be below `minimum` percent. Headers do not count.

/^ *-: *0:Source:/ {
    file = $0
    sub(/.*Source:/, "", file)
    wanted = file ~ /^[a-z].*\.(c|cc)$/ && file !~ /^tests\//
    next
}

wanted {
    split($0, part, ":")
    count = part[1]
    line = part[2] + 0
    gsub(/[ *]/, "", count)
    if (line == 0 || count == "-") {
        next
    }
    key = file ":" line
    if (!(key in seen)) {
        seen[key] = 1
        lines[file]++
    }
    if (count !~ /^[#=]/ && !(key in reached)) {
        reached[key] = 1
        covered[file]++
    }
}

END {
    sort = "sort -n"
    printf "%8s  %6s  %s\n", "covered", "lines", "file"
    fflush()
    for (file in lines) {
        printf "%6.1f %%  %6d  %s\n", 100 * covered[file] / lines[file], lines[file], file | sort
        all += lines[file]
        hit += covered[file]
    }
    close(sort)
    if (all == 0) {
        print "no file was measured"
        exit 1
    }
    printf "%6.1f %%  %6d  in all (at least %s %%)\n", 100 * hit / all, all, minimum
    exit 100 * hit < minimum * all
}
